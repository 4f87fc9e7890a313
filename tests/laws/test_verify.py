# SPDX-License-Identifier: Apache-2.0
"""verify: a few draft tokens per row and the state after each, so that a decoder can go on from any of
them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cula_testing import oracle, passes
from cula_testing.cases import Case, Inputs, make, state_like
from cula_testing.compare import assert_exact, assert_same_bits, assert_same_chain
from cula_testing.pools import assert_only_changed, whole
from cula_testing.strategies import cases

S = 4  # draft tokens


def drafts(data, algorithm: str, **fixed) -> Inputs:
    case = data.draw(cases(algorithm, packed=False, state=True, pool=False, **fixed))
    return make(case.but(lengths=(S,) * 3))


def room_for(inputs: Inputs, slots: int) -> torch.Tensor:
    return passes.empty_states(inputs, slots * S).unflatten(0, (slots, S))


@given(data=st.data())
def test_snapshots_are_the_states_of_a_decode_loop(algorithm, data):
    inputs = drafts(data, algorithm)

    def loop(inputs: Inputs, backend: str) -> passes.Result:
        outputs, states = [], []
        for t in range(S):
            one = passes.decode(inputs.tokens(t, t + 1), backend=backend)
            outputs.append(one.o)
            states.append(one.final_state)
            # The states on the way stay wide inside one verify, and are rounded only where they are stored.
            inputs = inputs.but(initial_state=one.final_state)
        return passes.Result(o=torch.cat(outputs, dim=1), snapshots=torch.stack(states, dim=1))

    def both(inputs: Inputs, backend: str) -> passes.Result:
        if backend:
            return loop(inputs, backend)
        return passes.verify(inputs, snapshots=room_for(inputs, 3))

    before = whole(inputs.initial_state)
    passes.assert_rule(both, inputs)
    assert_same_bits("base", before, whole(inputs.initial_state))


@given(data=st.data())
def test_a_chain_in_the_pool(algorithm, data):
    """Row n starts from slot [n, num_accepted[n] - 1] and leaves the state after token t in slot [n, t]."""
    inputs = drafts(data, algorithm)
    wanted = passes.verify(inputs, snapshots=room_for(inputs, 3))
    columns = S + data.draw(st.integers(0, 2))
    table = torch.tensor(data.draw(st.permutations(range(3 * columns + 2)))[: 3 * columns], dtype=torch.int32)
    table = table.view(3, columns)
    accepted = data.draw(st.lists(st.integers(1, columns), min_size=3, max_size=3))
    pool = state_like(inputs.case, 3 * columns + 2, pad=24)
    for n, count in enumerate(accepted):
        pool[int(table[n, count - 1])] = inputs.initial_state[n]
    before = whole(pool)
    result = passes.verify(
        inputs.but(initial_state=pool),
        in_place=True,
        state_indices=table,
        num_accepted=torch.tensor(accepted, dtype=torch.int32),
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.snapshots.flatten(0, 1), pool[table[:, :S].flatten().long()])
    assert_only_changed(before, pool, table[:, :S].flatten().tolist())


def test_without_num_accepted_the_first_slot_is_the_base(algorithm):
    inputs = make(Case(algorithm, (S,) * 3))
    wanted = passes.verify(inputs)
    table = torch.arange(3 * S, dtype=torch.int32).view(3, S)
    pool = state_like(inputs.case, 3 * S)
    pool[::S] = inputs.initial_state
    result = passes.verify(inputs.but(initial_state=pool), in_place=True, state_indices=table)
    assert_same_bits("o", wanted.o, result.o)


def test_the_base_may_be_named_apart_from_the_slots(algorithm):
    inputs = make(Case(algorithm, (S,) * 3))
    wanted = passes.verify(inputs, snapshots=room_for(inputs, 3))
    pool = state_like(inputs.case, 3 * S + 3)
    pool[:3] = inputs.initial_state
    table = 3 + torch.arange(3 * S, dtype=torch.int32).view(3, S)
    base = torch.arange(3, dtype=torch.int32)
    result = passes.verify(
        inputs.but(initial_state=pool, initial_state_indices=base), in_place=True, state_indices=table
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.snapshots.flatten(0, 1), pool[3:])
    assert_same_bits("base", inputs.initial_state, pool[:3])


@given(data=st.data())
def test_verify_then_pick_is_decode(algorithm, data):
    """Accepting a draft tokens and going on from the picked state is decoding those tokens."""
    inputs = drafts(data, algorithm, state_dtype=torch.float32)
    accepted = data.draw(st.integers(1, S - 1))

    def pick(inputs: Inputs, backend: str) -> passes.Result:
        draft = passes.verify(inputs, backend=backend, snapshots=room_for(inputs, 3))
        onward = inputs.tokens(accepted, S).but(initial_state=draft.snapshots[:, accepted - 1].contiguous())
        result = passes.decode(onward, backend=backend)
        return passes.Result(
            o=torch.cat([draft.o[:, :accepted], result.o], dim=1), final_state=result.final_state
        )

    def either(inputs: Inputs, backend: str) -> passes.Result:
        return passes.decode(inputs, backend=backend) if backend else pick(inputs, backend)

    passes.assert_rule(either, inputs)


@given(data=st.data())
def test_a_tree(algorithm, data):
    inputs = drafts(data, algorithm)
    parents = torch.tensor(
        [[data.draw(st.integers(-1, t - 1)) for t in range(S)] for _ in range(3)], dtype=torch.int32
    )

    def call(inputs: Inputs, backend: str) -> passes.Result:
        return passes.verify(inputs, backend=backend, parents=parents, snapshots=room_for(inputs, 3))

    passes.assert_rule(call, inputs)
    double = inputs.double()
    exact = call(double, "reference")
    for n in range(3):
        tree = oracle.recurrence(double, n, 0, S, double.initial_state[n], parents=parents[n])
        assert_exact("o", exact.o[n], tree.o)
        assert_exact("snapshots", exact.snapshots[n], tree.states[1:])


def test_a_chain_is_a_tree(algorithm):
    inputs = make(Case(algorithm, (S,) * 3))
    chain = passes.verify(inputs, snapshots=room_for(inputs, 3))
    parents = (torch.arange(S, dtype=torch.int32) - 1).expand(3, S)
    tree = passes.verify(inputs, snapshots=room_for(inputs, 3), parents=parents.contiguous())
    assert_same_chain(chain.o, tree.o)
    assert_same_chain(chain.snapshots, tree.snapshots)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_draft_that_is_nan_reaches_no_earlier_one(algorithm, name):
    inputs = make(Case(algorithm, (S,) * 2))
    if getattr(inputs, name) is None:
        pytest.skip("the algorithm has no such tensor")
    wanted = passes.verify(inputs, snapshots=room_for(inputs, 2))
    wrong = getattr(inputs, name).clone()
    wrong[0, inputs.span(name, 2, 3)] = float("nan")
    found = passes.verify(inputs.but(**{name: wrong}), snapshots=room_for(inputs, 2))
    assert found.o[0, 2].isnan().any()
    assert_same_bits("o before it", wanted.o[0, :2], found.o[0, :2])
    assert_same_bits("states before it", wanted.snapshots[0, :2], found.snapshots[0, :2])
    assert_same_bits("o of the other row", wanted.o[1], found.o[1])


@pytest.mark.parametrize("columns", [2, S])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(2, 0, 1, 2), (0, 2, 2), (1, 1, 0)])
def test_packed_rows_of_a_table(algorithm, lengths, index, columns):
    """Empty rows, a null row, tokens after the last row; slots and snapshots at once."""
    inputs = make(Case(algorithm, lengths, packed=True, tail=2))
    rows = len(lengths)
    wanted = passes.verify(inputs, snapshots=room_for(inputs, rows))
    table = 1 + torch.arange(rows * columns, dtype=index).view(rows, columns).flip(1)
    pool = state_like(inputs.case, rows * columns + 2)
    pool[table[:, 0].long()] = inputs.initial_state
    null = rows - 1
    table[null] = -1
    before, room = whole(pool), room_for(inputs, rows)
    found = passes.verify(inputs.but(initial_state=pool), in_place=True, state_indices=table, snapshots=room)
    ends = [sum(lengths[:n]) for n in range(rows + 1)]
    assert_same_chain(found.o[:, : ends[null]], wanted.o[:, : ends[null]])
    assert not found.o[:, ends[null] :].any(), "outputs of a null row, and of tokens of no row"
    assert room[null].isnan().all()
    stored = []
    for n, length in enumerate(lengths[:null]):
        for t in range(length):
            assert_same_chain(pool[int(table[n, t])], wanted.snapshots[n, t])
            assert_same_bits("snapshot", room[n, t].to(pool.dtype), pool[int(table[n, t])])
            stored.append(int(table[n, t]))
    assert_only_changed(before, pool, stored)


def test_siblings_do_not_see_each_other(algorithm):
    """Tokens that continue the base directly give what each gives alone."""
    inputs = make(Case(algorithm, (S,) * 2))
    star = passes.verify(inputs, parents=torch.full((2, S), -1, dtype=torch.int32))
    for t in range(S):
        alone = passes.verify(inputs.tokens(t, t + 1))
        assert_same_bits(f"token {t}", alone.o, star.o[:, t : t + 1])


def test_a_tree_in_the_pool(algorithm):
    inputs = make(Case(algorithm, (S,) * 2))
    parents = torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 1]], dtype=torch.int32)
    wanted = passes.verify(inputs, parents=parents, snapshots=room_for(inputs, 2))
    pool = state_like(inputs.case, 2 * S + 2)
    pool[:2] = inputs.initial_state
    table = 2 + torch.arange(2 * S, dtype=torch.int32).view(2, S)
    result = passes.verify(
        inputs.but(initial_state=pool, initial_state_indices=torch.arange(2, dtype=torch.int32)),
        in_place=True,
        state_indices=table,
        parents=parents,
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.snapshots.flatten(0, 1), pool[2:])


def test_snapshot_slots_by_index(algorithm):
    inputs = make(Case(algorithm, (S,) * 3))
    wanted = passes.verify(inputs, snapshots=room_for(inputs, 3))
    room = room_for(inputs, 5)
    before = whole(room)
    passes.verify(inputs, snapshots=room, snapshot_indices=torch.tensor([4, -1, 2], dtype=torch.int32))
    assert_same_bits("row 0", wanted.snapshots[0], room[4])
    assert_same_bits("row 2", wanted.snapshots[2], room[2])
    assert_only_changed(before, room, [2, 4])


@pytest.mark.parametrize("null_index", [-1, 0])
def test_every_index_may_be_int64(algorithm, null_index):
    """Tables of slots, counts, snapshots' slots and parents, each int64 alone and all of them together."""
    inputs = make(Case(algorithm, (S,) * 3))
    indices = {
        "state_indices": torch.tensor([[4, 1, 2, 3], [null_index] * S, [5, 6, 7, 8]]),
        "num_accepted": torch.tensor([1, 1, 3]), "snapshot_indices": torch.tensor([3, 0, -1]),
        "parents": torch.tensor([[-1, 0, 1, 0], [-1, 0, 1, 2], [-1, -1, 1, 1]]),
    }  # fmt: skip
    base = state_like(inputs.case, 9)
    base[[4, 7]] = inputs.initial_state[[0, 2]]

    def run(names) -> passes.Result:
        named = {name: x if name in names else x.int() for name, x in indices.items()}
        more = {
            "in_place": True,
            "snapshots": torch.zeros_like(room_for(inputs, 4)),
            "null_index": null_index,
        }
        return passes.verify(inputs.but(initial_state=base.clone()), **named, **more)

    wanted = run(())
    assert not wanted.o[1].any()
    assert wanted.o[[0, 2]].abs().sum() > 0
    for names in (*((name,) for name in indices), tuple(indices)):
        for (name, one), (_, two) in zip(wanted.items(), run(names).items(), strict=True):
            assert_same_bits(f"{names} {name}", one, two)


@pytest.mark.parametrize("lengths", [(1, 4, 0, 2), (0, 0), (4,)])
def test_ragged_rows(algorithm, lengths):
    inputs = make(Case(algorithm, lengths, packed=True, tail=1))

    def call(inputs: Inputs, backend: str) -> passes.Result:
        return passes.verify(inputs, backend=backend, final_state=passes.empty_states(inputs, len(lengths)))

    result = passes.assert_rule(call, inputs)
    room = room_for(inputs, len(lengths))
    passes.verify(inputs, snapshots=room)
    for n, length in enumerate(lengths):
        assert room[n, length:].isnan().all(), "no snapshot beyond a row's tokens"
        last = room[n, length - 1] if length else inputs.initial_state[n]
        assert_same_bits("last snapshot", last, result.final_state[n])


@pytest.mark.parametrize("null_index", [-1, 0])
def test_null_rows_are_skipped(algorithm, null_index):
    inputs = make(Case(algorithm, (S,) * 2))
    wanted = passes.verify(inputs)
    pool = state_like(inputs.case, 2 * S + 1)
    table = 1 + torch.arange(2 * S, dtype=torch.int32).view(2, S)
    pool[1 + S] = inputs.initial_state[1]
    table[0] = null_index
    before = whole(pool)
    result = passes.verify(
        inputs.but(initial_state=pool), in_place=True, state_indices=table, null_index=null_index
    )
    assert not result.o[0].any()
    assert_same_bits("o", wanted.o[1], result.o[1])
    assert_only_changed(before, pool, table[1].tolist())


def test_two_runs_have_the_same_bits(algorithm):
    inputs = make(Case(algorithm, (S,) * 3))
    one, two = (passes.verify(inputs, snapshots=room_for(inputs, 3)) for _ in range(2))
    assert_same_bits("o", one.o, two.o)
    assert_same_bits("snapshots", one.snapshots, two.snapshots)


def test_verify_is_decode(algorithm):
    """With the final state alone, verify of a chain is decode of it."""
    inputs = make(Case(algorithm, (S,) * 3, dtype=torch.float32))

    def either(inputs: Inputs, backend: str) -> passes.Result:
        if backend:
            return passes.decode(inputs, backend=backend)
        return passes.verify(inputs, final_state=passes.empty_states(inputs, 3))

    passes.assert_rule(either, inputs)
