# SPDX-License-Identifier: Apache-2.0
"""Forks: sequences that start from a slot which another sequence of the call writes (src/core/forks.h)."""

from __future__ import annotations

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, make, state_like
from cula_testing.compare import assert_same_bits
from cula_testing.pools import assert_only_changed, whole

CALLS = pytest.mark.parametrize("call", [passes.prefill, passes.decode], ids=["prefill", "decode"])
KINDS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
# Where a chain of forks is refused: elsewhere the values of the indices are not read before the launch.
READ = device.values_are_read()


def problem(algorithm: str, rows: int, slots: int, **fields):
    """`rows` sequences of five tokens, and a pool for them."""
    inputs = make(Case(algorithm, (5,) * rows, **fields))
    pool = state_like(inputs.case, slots, pad=24)
    pool.copy_(torch.randn(pool.shape))
    return inputs.but(initial_state=pool, initial_state_indices=None)


def apart(call, inputs, starts: list[int], live: list[bool] | None = None):
    """What the rows give when none of them writes what another reads."""
    states = inputs.initial_state[starts].clone()
    if live is not None:
        states[[not alive for alive in live]] = 0
    return call(inputs.but(initial_state=states))


@CALLS
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.int32, {}),
        (torch.int64, {}),
        (torch.int32, {"state_dtype": torch.bfloat16}),
        (torch.int32, {"k_first": True}),
        (torch.int32, {"value_dim": 300}),
    ],
)
def test_a_prefix_is_forked(algorithm, call, dtype, fields):
    """Four copies of slot 5, of which one stays there, and a sequence of its own."""
    inputs = problem(algorithm, 5, 9, **fields)
    starts, ends = [5, 5, 5, 2, 5], [8, 5, 0, 2, 3]
    wanted = apart(call, inputs, starts)
    before = whole(inputs.initial_state)
    result = call(
        inputs.but(initial_state_indices=torch.tensor(starts, dtype=dtype)),
        in_place=True,
        final_state_indices=torch.tensor(ends, dtype=dtype),
    )
    assert_same_bits("o", wanted.o, result.o)
    rounded = wanted.final_state.to(inputs.initial_state.dtype)
    assert_same_bits("states", rounded, inputs.initial_state[ends])
    assert_only_changed(before, inputs.initial_state, ends)


@CALLS
@KINDS
def test_a_sequence_alone_moves(algorithm, call, dtype):
    """It has nobody to be a fork of."""
    inputs = problem(algorithm, 1, 3)
    wanted = apart(call, inputs, [2])
    before = whole(inputs.initial_state)
    result = call(
        inputs.but(initial_state_indices=torch.tensor([2], dtype=dtype)),
        in_place=True,
        final_state_indices=torch.tensor([0], dtype=dtype),
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.final_state, inputs.initial_state[[0]])
    assert_only_changed(before, inputs.initial_state, [0])


@CALLS
@pytest.mark.parametrize("null", ["start", "end"])
def test_a_sequence_alone_may_be_null(algorithm, call, null):
    inputs = problem(algorithm, 1, 3)
    before = whole(inputs.initial_state)
    starts, ends = ([1], [2]) if null == "start" else ([2], [1])
    result = call(
        inputs.but(initial_state_indices=torch.tensor(starts, dtype=torch.int32)),
        in_place=True,
        final_state_indices=torch.tensor(ends, dtype=torch.int32),
        null_index=1,
    )
    assert not result.o.any()
    assert_same_bits("pool", before, whole(inputs.initial_state))


@CALLS
def test_many_forks_give_the_same_bits_each_time(algorithm, call):
    """64 rows of one prefix, in an order that puts the one that overwrites it first."""
    inputs = problem(algorithm, 64, 64, heads=2, value_heads=4)
    starts, ends = [0] * 64, list(range(64))
    wanted = apart(call, inputs, starts)
    pool = inputs.initial_state.clone()
    for _ in range(3):
        inputs.initial_state.copy_(pool)
        result = call(
            inputs.but(initial_state_indices=torch.tensor(starts, dtype=torch.int32)),
            in_place=True,
            final_state_indices=torch.tensor(ends, dtype=torch.int32),
        )
        assert_same_bits("o", wanted.o, result.o)
        assert_same_bits("states", wanted.final_state, inputs.initial_state)


@CALLS
def test_who_starts_from_zero_reads_no_slot(algorithm, call):
    """A chain in the indices alone: every second sequence starts from zero."""
    inputs = problem(algorithm, 4, 5)
    starts, live = [0, 1, 2, 3], [True, False, True, False]
    wanted = apart(call, inputs, starts, live)
    result = call(
        inputs.but(
            initial_state_indices=torch.tensor(starts, dtype=torch.int32),
            has_initial_state=torch.tensor(live),
        ),
        in_place=True,
        final_state_indices=torch.tensor([1, 2, 3, 4], dtype=torch.int32),
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.final_state, inputs.initial_state[1:])


@CALLS
def test_null_rows_neither_read_nor_write(algorithm, call):
    inputs = problem(algorithm, 4, 4)
    wanted = apart(call, inputs, [1, 1, 1, 1])
    before = whole(inputs.initial_state)
    result = call(
        inputs.but(initial_state_indices=torch.tensor([1, -1, 1, 3], dtype=torch.int32)),
        in_place=True,
        final_state_indices=torch.tensor([1, 3, 2, 0], dtype=torch.int32),
        null_index=0,
    )
    assert_same_bits("o", wanted.o[[0, 2]], result.o[[0, 2]])
    assert not result.o[[1, 3]].any()
    assert_same_bits("states", wanted.final_state[[0, 2]], inputs.initial_state[[1, 2]])
    assert_only_changed(before, inputs.initial_state, [1, 2])


@CALLS
def test_rows_without_start_indices(algorithm, call):
    """Row n starts from the slot of its own number, even where that is the null index; only its end may be
    null."""
    inputs = problem(algorithm, 3, 3)
    wanted = apart(call, inputs, [0, 1, 2])
    before = whole(inputs.initial_state)
    ends = torch.tensor([0, -1, 1], dtype=torch.int32)
    result = call(inputs, in_place=True, final_state_indices=ends, null_index=2)
    assert_same_bits("o", wanted.o[[0, 2]], result.o[[0, 2]])
    assert not result.o[1].any()
    assert_same_bits("states", wanted.final_state[[0, 2]], inputs.initial_state[[0, 1]])
    assert_only_changed(before, inputs.initial_state, [0, 1])


@CALLS
@pytest.mark.parametrize(
    ("starts", "ends", "sentence", "skipped"),
    [
        ([0, 1, 2, 3], [1, 2, 3, 4], "slot 2, from which sequence 2 starts", [1, 2]),
        ([0, 1, 2, 3], [1, 0, 2, 3], "slot 1, from which sequence 1 starts", [0, 1]),
        ([0, 0, 1, 3], [0, 1, 2, 3], "slot 1, from which sequence 2 starts", [1]),
    ],
)
def test_a_chain_is_refused_or_skipped(algorithm, call, starts, ends, sentence, skipped):
    """No wrong result: an error where the values are read, and the rows inside of the chain as null rows
    elsewhere."""
    inputs = problem(algorithm, 4, 5)
    wanted = apart(call, inputs, starts)
    before = whole(inputs.initial_state)
    named = {"in_place": True, "final_state_indices": torch.tensor(ends, dtype=torch.int32)}
    chained = inputs.but(initial_state_indices=torch.tensor(starts, dtype=torch.int32))
    if READ:
        with pytest.raises(ValueError, match=f"must not let sequence {skipped[0]} start .*{sentence}"):
            call(chained, **named)
        assert_same_bits("pool", before, whole(inputs.initial_state))
        return
    result = call(chained, **named)
    rest = [n for n in range(4) if n not in skipped]
    assert not result.o[skipped].any()
    assert_same_bits("o", wanted.o[rest], result.o[rest])
    assert_same_bits("states", wanted.final_state[rest], inputs.initial_state[[ends[n] for n in rest]])


@KINDS
@pytest.mark.parametrize("parents", [None, [[-1, 0, -1, 1, 2]] * 3])
def test_drafts_of_one_prefix(algorithm, dtype, parents):
    """Three rows of drafts start from slot 3, which the second one overwrites."""
    inputs = problem(algorithm, 3, 16)
    tree = None if parents is None else torch.tensor(parents, dtype=dtype)
    base = inputs.initial_state[[3, 3, 3]].clone()
    room = passes.empty_states(inputs, 15).unflatten(0, (3, 5))
    wanted = passes.verify(inputs.but(initial_state=base), parents=tree, snapshots=room)
    table = torch.tensor([[0, 1, 2, 4, 5], [3, 6, 7, 8, 9], [10, 11, 12, 13, 14]], dtype=dtype)
    result = passes.verify(
        inputs.but(initial_state_indices=torch.tensor([3, 3, 3], dtype=dtype)),
        in_place=True,
        state_indices=table,
        parents=tree,
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.snapshots, inputs.initial_state[table.long()])


@KINDS
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_drafts_of_one_prefix(algorithm, dtype, rows, state_dtype):
    """As many as GPUs verify at once; the last row overwrites the slot that all start from, also where it is
    the only one."""
    inputs = make(Case(algorithm, (4,) * rows, key_dim=64, value_dim=72, state_dtype=state_dtype))
    pool = state_like(inputs.case, 4 * rows, pad=24)
    pool.copy_(torch.randn(pool.shape))
    base = pool[[0] * rows].clone()
    room = passes.empty_states(inputs, 4 * rows).unflatten(0, (rows, 4))
    wanted = passes.verify(inputs.but(initial_state=base), snapshots=room)
    table = torch.arange(4 * rows).flip(0).view(rows, 4).to(dtype)
    result = passes.verify(
        inputs.but(initial_state=pool, initial_state_indices=torch.zeros(rows, dtype=dtype)),
        in_place=True,
        state_indices=table,
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.snapshots, pool[table.long()])


def test_drafts_that_store_nothing_may_not_start_from_what_others_write(algorithm):
    inputs = problem(algorithm, 2, 8)
    named = {"in_place": True, "state_indices": torch.tensor([[3, 0, 1, 2, 4], [-1] * 5], dtype=torch.int32)}
    forked = inputs.but(initial_state_indices=torch.tensor([3, 3], dtype=torch.int32))
    if READ:
        with pytest.raises(ValueError, match=r"must not let sequence 1 start .* writes none itself"):
            passes.verify(forked, **named)
    else:
        assert not passes.verify(forked, **named).o[1].any()


@KINDS
@pytest.mark.parametrize("key_dim", [64, 100, 128, 256])
@pytest.mark.parametrize(
    "parents",
    [[[-1, 0, -1, 2], [-1, -1, 0, 1]], [[-1, -1, -1, -1], [-1, 0, 0, -1]]],
    ids=["two branches", "siblings"],
)
def test_a_tree_whose_base_lies_in_one_of_its_slots(algorithm, dtype, key_dim, parents):
    """vLLM's convention, where a row starts from the slot of its last accepted token, and a later token
    continues the base after an earlier one was stored there."""
    inputs = make(Case(algorithm, (4, 4), key_dim=key_dim))
    tree = torch.tensor(parents, dtype=dtype)
    room = passes.empty_states(inputs, 8).unflatten(0, (2, 4))
    wanted = passes.verify(inputs, parents=tree, snapshots=room)
    pool = state_like(inputs.case, 12)
    pool[[3, 9]] = inputs.initial_state
    table = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]], dtype=dtype)
    result = passes.verify(
        inputs.but(initial_state=pool),
        in_place=True,
        state_indices=table,
        num_accepted=torch.tensor([1, 3], dtype=dtype),
        parents=tree,
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.snapshots, pool[table.long()])


@CALLS
@pytest.mark.parametrize("view", ["fewer slots", "one slot, another stride"])
def test_what_is_read_may_be_a_part_of_what_is_written(algorithm, call, view):
    """A fork is copied to a slot of the states that are written, which those that are read need not have."""
    inputs = problem(algorithm, 2, 8)
    pool = inputs.initial_state
    wanted = apart(call, inputs, [0, 0])
    part = pool[:2]
    if view != "fewer slots":
        part = pool.as_strided(
            (1, *pool.shape[1:]), (2 * pool.stride(0), *pool.stride()[1:]), pool.storage_offset()
        )
    before = whole(pool)
    result = call(
        inputs.but(initial_state=part, initial_state_indices=torch.tensor([0, 0], dtype=torch.int32)),
        final_state=pool,
        final_state_indices=torch.tensor([0, 3], dtype=torch.int32),
    )
    assert_same_bits("o", wanted.o, result.o)
    assert_same_bits("states", wanted.final_state, pool[[0, 3]])
    assert_only_changed(before, pool, [0, 3])


def test_drafts_start_within_the_states_that_are_read():
    inputs = problem("kda", 1, 8)
    named = {"final_state": inputs.initial_state.clone(), "state_indices": torch.tensor([[7, 6, 5, 4, 3]])}
    few = inputs.but(initial_state=inputs.initial_state[:2])
    if READ:
        with pytest.raises(
            ValueError, match="state_indices must name a slot of initial_state's 2 where a sequence starts"
        ):
            passes.verify(few, **named)
    else:
        assert not passes.verify(few, **named).o.any()


@CALLS
@pytest.mark.parametrize("number", [-(2**63), -(2**32), -(2**32) + 3, -1])
def test_every_negative_int64_is_null(algorithm, call, number):
    inputs = problem(algorithm, 2, 4)
    wanted = apart(call, inputs, [0, 1])
    before = whole(inputs.initial_state)
    result = call(inputs.but(initial_state_indices=torch.tensor([number, 1])), in_place=True)
    assert not result.o[0].any()
    assert_same_bits("o", wanted.o[1], result.o[1])
    assert_only_changed(before, inputs.initial_state, [1])


@CALLS
def test_indices_of_int64(algorithm, call):
    inputs = problem(algorithm, 3, 6)
    slots = torch.tensor([4, -1, 0])
    one = call(
        inputs.but(initial_state_indices=slots.int(), initial_state=inputs.initial_state.clone()),
        in_place=True,
    )
    two = call(inputs.but(initial_state_indices=slots), in_place=True)
    strided = torch.stack([slots, torch.full_like(slots, 99)], dim=1)[:, 0]
    three = call(
        inputs.but(initial_state_indices=strided, initial_state=one.final_state.clone()), in_place=True
    )
    four = call(inputs.but(initial_state_indices=slots, initial_state=one.final_state.clone()), in_place=True)
    for name in ("o", "final_state"):
        assert_same_bits(name, getattr(one, name), getattr(two, name))
        assert_same_bits(name, getattr(four, name), getattr(three, name))


@CALLS
def test_initial_and_final_indices_of_either_type(algorithm, call):
    starts, ends = torch.tensor([4, 2, -1]), torch.tensor([5, -1, 0])
    inputs, wanted = problem(algorithm, 3, 6), None
    for one, two in ((torch.int32, torch.int32), (torch.int64, torch.int32), (torch.int32, torch.int64)):
        own = inputs.but(initial_state=inputs.initial_state.clone(), initial_state_indices=starts.to(one))
        result = call(own, in_place=True, final_state_indices=ends.to(two))
        wanted = wanted or result
        assert_same_bits("o", wanted.o, result.o)
        assert_same_bits("pool", wanted.final_state, result.final_state)


def test_plans_of_int64(algorithm):
    inputs = make(Case(algorithm, (130, 70), packed=True))
    plan = torch.tensor([[0, 64, 2], [1, 70, 0], [0, 128, -1]])
    states = [passes.empty_states(inputs, 3) for _ in range(2)]
    for room, kind in zip(states, (torch.int32, torch.int64), strict=True):
        passes.prefill(inputs, checkpoints=room, checkpoint_plan=plan.to(kind))
    assert_same_bits("checkpoints", *states)
