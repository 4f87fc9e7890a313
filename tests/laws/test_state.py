# SPDX-License-Identifier: Apache-2.0
"""States: pools with indices, null rows, masks, checkpoints; what is named is right, what is not named is
untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cula_testing import passes
from cula_testing.cases import Case, Inputs, make, state_like
from cula_testing.compare import assert_accurate, assert_same_bits
from cula_testing.pools import assert_only_changed, whole
from cula_testing.strategies import cases

CALLS = pytest.mark.parametrize("call", [passes.prefill, passes.decode], ids=["prefill", "decode"])


@CALLS
@given(data=st.data())
def test_pool_in_place_is_the_dense_state(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, state=True, pool=True)))
    dense = call(inputs)
    slots = inputs.initial_state_indices.tolist()
    before = whole(inputs.initial_state)
    result = call(inputs, in_place=True)
    assert_same_bits("o", dense.o, result.o)
    assert_same_bits("state", dense.final_state, inputs.initial_state[slots])
    assert_only_changed(before, inputs.initial_state, slots)


@CALLS
@given(data=st.data())
def test_read_and_write_indices_may_differ(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, state=True, pool=True)))
    dense = call(inputs)
    N, read = inputs.case.sequences, inputs.initial_state_indices.tolist()
    free = [slot for slot in range(len(inputs.initial_state)) if slot not in read]
    write = data.draw(st.permutations(free))[:N]
    before = whole(inputs.initial_state)
    result = call(inputs, in_place=True, final_state_indices=torch.tensor(write, dtype=torch.int32))
    assert_same_bits("o", dense.o, result.o)
    assert_same_bits("state", dense.final_state, inputs.initial_state[write])
    assert_only_changed(before, inputs.initial_state, write)


@CALLS
@given(data=st.data())
def test_two_rows_may_start_from_one_slot(algorithm, call, data):
    """A shared prefix: read twice, written apart."""
    inputs = make(data.draw(cases(algorithm, packed=False, state=True, pool=True)).but(lengths=(5, 5)))
    inputs.initial_state_indices[1] = inputs.initial_state_indices[0]
    shared = inputs.initial_state[[int(inputs.initial_state_indices[0])] * 2]
    one, two = call(inputs), call(inputs.but(initial_state=shared, initial_state_indices=None))
    assert_same_bits("o", one.o, two.o)
    assert_same_bits("final_state", one.final_state, two.final_state)


@CALLS
@pytest.mark.parametrize("null_index", [-1, 0])
@given(data=st.data())
def test_null_rows_are_skipped(algorithm, call, null_index, data):
    case = data.draw(cases(algorithm, packed=False, state=True, pool=True)).but(lengths=(5,) * 4)
    inputs = make(case)
    pool, slots = inputs.initial_state, inputs.initial_state_indices
    # Slot 0 is an ordinary slot where null_index is -1; where it is 0, nobody else may own it.
    taken = set(slots.tolist())
    spare = next(slot for slot in range(1, len(pool)) if slot not in taken)
    if null_index == 0 and 0 in taken:
        pool[spare] = pool[0]
        slots[slots == 0] = spare
    full = call(inputs)
    nulls = data.draw(st.sets(st.integers(0, 3), min_size=1))
    rest = [n for n in range(4) if n not in nulls]
    slots[list(nulls)] = null_index
    before = whole(pool)
    result = call(inputs, in_place=True, null_index=null_index)
    assert_same_bits("o", full.o[rest], result.o[rest])
    assert_same_bits("state", full.final_state[rest], pool[slots[rest].long()])
    assert not result.o[list(nulls)].any(), "the output of a null row is zero"
    assert_only_changed(before, pool, slots[rest].tolist())


@pytest.mark.parametrize("lengths", [(5, 0, 70, 0), (0, 0)])
def test_null_rows_without_tokens_write_nothing(target, algorithm, lengths):
    """They have no outputs to zero: not a token before or behind those of others either."""
    inputs = make(Case(algorithm, lengths, packed=True, pool=True))
    empty = [n for n, length in enumerate(lengths) if length == 0]
    rest = [n for n, length in enumerate(lengths) if length > 0]
    passes.skip_if_declined(lambda given, backend: passes.prefill(given, backend=backend), inputs, target)
    full = passes.prefill(inputs, backend=target)
    inputs.initial_state_indices[empty] = -1
    before = whole(inputs.initial_state)
    tokens, frame = sum(lengths), 200
    memory = inputs.v.new_full((1, tokens + 2 * frame, *full.o.shape[2:]), torch.nan)
    o = memory[:, frame : frame + tokens]
    passes.prefill(inputs, backend=target, o=o, in_place=True)
    assert_same_bits("o", full.o, o)
    assert memory[:, :frame].isnan().all()
    assert memory[:, frame + tokens :].isnan().all()
    slots = inputs.initial_state_indices[rest].long()
    assert_same_bits("state", full.final_state[rest], inputs.initial_state[slots])
    assert_only_changed(before, inputs.initial_state, slots.tolist())


@CALLS
def test_a_null_row_may_only_be_null_in_one_of_two_indices(algorithm, call):
    inputs = make(Case(algorithm, (5, 5), pool=True))
    pool, before = inputs.initial_state, whole(inputs.initial_state)
    result = call(inputs, in_place=True, final_state_indices=torch.tensor([-1, -1], dtype=torch.int32))
    assert not result.o.any()
    assert_only_changed(before, pool, [])


@CALLS
@given(data=st.data())
def test_has_initial_state(algorithm, call, data):
    case = data.draw(cases(algorithm, packed=False, state=True)).but(lengths=(5,) * 3)
    inputs = make(case)
    mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    fresh = call(inputs.but(initial_state=None, initial_state_indices=None))
    kept = call(inputs)
    # What a masked slot holds is not read.
    slots = range(3) if inputs.initial_state_indices is None else inputs.initial_state_indices.tolist()
    for n, slot in enumerate(slots):
        if not mask[n]:
            inputs.initial_state[slot] = float("nan")
    mixed = call(inputs.but(has_initial_state=torch.tensor(mask)))
    for n, has in enumerate(mask):
        source = kept if has else fresh
        assert_same_bits("o", source.o[n], mixed.o[n])
        assert_same_bits("final_state", source.final_state[n], mixed.final_state[n])


@CALLS
@given(data=st.data())
def test_final_state_may_be_the_initial_state(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, state=True, pool=False)))
    apart = call(inputs)
    same = call(inputs, final_state=inputs.initial_state)
    assert_same_bits("o", apart.o, same.o)
    assert_same_bits("state", apart.final_state, inputs.initial_state)


@CALLS
def test_zero_length_sequences_keep_their_state(algorithm, call):
    inputs = make(Case(algorithm, (0, 5, 0, 0), packed=True, tail=2))
    result = call(inputs)
    empty = [0, 2, 3]
    assert_same_bits("state", inputs.initial_state[empty], result.final_state[empty])
    fresh = call(inputs.but(initial_state=None))
    assert not fresh.final_state[empty].any()


@CALLS
def test_no_sequences_at_all(algorithm, call):
    inputs = make(Case(algorithm, (3,), packed=True, state=False))
    inputs.cu_seqlens, inputs.case = torch.zeros(1, dtype=torch.int32), inputs.case.but(lengths=())
    assert not call(inputs, o=passes.empty_o(inputs)).o.any()


@CALLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_dtypes_round_once(algorithm, call, dtype):
    """A narrow pool holds the rounding of what a float32 pool would hold."""
    inputs = make(Case(algorithm, (70, 70), state_dtype=dtype))
    wide = inputs.but(
        initial_state=inputs.initial_state.float(), case=inputs.case.but(state_dtype=torch.float32)
    )
    narrow, exact = call(inputs), call(wide)
    assert_same_bits("o", narrow.o, exact.o)
    assert_same_bits("state", narrow.final_state, exact.final_state.to(dtype))


# States on the way.


@given(data=st.data())
def test_checkpoints_are_final_states_of_prefixes(algorithm, data):
    case = data.draw(cases(algorithm)).but(packed=True, lengths=(200, 0, 64, 7))
    inputs = make(case)
    everything = [(n, t) for n, T in enumerate(case.lengths) for t in sorted({*range(0, T + 1, 64), T})]
    chosen = data.draw(st.permutations(everything))[: data.draw(st.integers(1, len(everything)))]
    slots = data.draw(st.permutations(range(len(chosen) + 3)))[: len(chosen)]
    rows = [(n, t, slot) for (n, t), slot in zip(chosen, slots, strict=True)] + [(0, 0, -1)]
    plan = torch.tensor(rows, dtype=torch.int32)
    room = state_like(case, len(chosen) + 3, pad=40)
    before = whole(room)
    plain, result = passes.prefill(inputs), passes.prefill(inputs, checkpoints=room, checkpoint_plan=plan)
    assert_same_bits("o", plain.o, result.o)
    assert_same_bits("final_state", plain.final_state, result.final_state)
    assert_only_changed(before, room, list(slots))

    bounds = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
    for (n, t), slot in zip(chosen, slots, strict=True):

        def prefix(inputs: Inputs, backend: str, n: int = n, t: int = t) -> torch.Tensor:
            cut = inputs.but(**inputs.rows(bounds[n], bounds[n] + t))
            cut.case = inputs.case.but(lengths=(t,), tail=0)
            cut.cu_seqlens = torch.tensor([0, t], dtype=torch.int32)
            if cut.initial_state_indices is not None:
                cut.initial_state_indices = cut.initial_state_indices[n : n + 1]
            elif cut.initial_state is not None:
                cut.initial_state = cut.initial_state[n : n + 1]
            return passes.prefill(cut, backend=backend).final_state[0]

        exact, naive = prefix(inputs.double(), "reference"), prefix(inputs, "reference:naive")
        assert_accurate(f"checkpoint {n, t}", room[slot], exact, naive, case.dtype)
        if t == case.lengths[n]:
            assert_same_bits("last checkpoint", room[slot], plain.final_state[n])


@pytest.mark.parametrize(
    ("packed", "lengths"),
    [(False, (150, 150)), (True, (150, 0, 16, 65)), (True, (150, *[0, 16] * 16, 65))],
    ids=["batch", "packed", "many"],
)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_chunk_states_are_states_of_prefixes(algorithm, packed, lengths, chunk):
    inputs = make(Case(algorithm, lengths, packed=packed))

    def call(inputs, backend):
        starts = [range(0, length, chunk) for length in lengths]
        rows, columns = (1, sum(map(len, starts))) if packed else (len(starts), len(starts[0]))
        room = passes.empty_states(inputs, rows * columns).unflatten(0, (rows, columns))
        return passes.prefill(inputs, backend=backend, chunk_states=room, chunk_tokens=chunk)

    passes.assert_rule(call, inputs)


def test_chunk_states_of_64_tokens_are_checkpoints(algorithm):
    inputs = make(Case(algorithm, (200, 200)))
    plan = torch.tensor(
        [(n, t, 4 * n + t // 64) for n in range(2) for t in (0, 64, 128, 192)], dtype=torch.int32
    )
    dense, chosen = passes.empty_states(inputs, 8).unflatten(0, (2, 4)), passes.empty_states(inputs, 8)
    plain = passes.prefill(inputs)
    result = passes.prefill(inputs, chunk_states=dense, checkpoints=chosen, checkpoint_plan=plan)
    assert_same_bits("o", plain.o, result.o)
    assert_same_bits("final_state", plain.final_state, result.final_state)
    assert_same_bits("states", dense.flatten(0, 1), chosen)
