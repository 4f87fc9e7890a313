# SPDX-License-Identifier: Apache-2.0
"""Values that only the device sees, wrong in every way: no access outside the call's tensors, and slots that
no index names keep their bits. A row with an index out of range is skipped like a null row."""

from __future__ import annotations

import pytest
import torch

from cula_testing import device
from cula_testing.arena import Arena
from cula_testing.compare import assert_same_bits
from cula_testing.kinds import DRAFTS, Call, assert_same_results, ready

FILL = 0xA5
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
BIG, SMALL = 2**63 - 1, -(2**63)
PACKED = ("varlen", "pool", "recurrent", "segment")


def held(call: Call) -> tuple[Arena, Call, torch.Tensor]:
    """The call between guards, and the memory before it."""
    arena = Arena(64 << 20, FILL)
    moved = arena.hold(call)
    return arena, moved, arena.bytes.clone()


def i32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def a_right_call_is_right_afterwards():
    yield
    torch.cuda.synchronize()
    one, two = ready("varlen", "kda"), ready("varlen", "kda")
    one()
    two()
    assert all(tensor.isfinite().all() for tensor in one.results().values())
    assert_same_results("afterwards", one, two)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    "bounds",
    [
        (0, 150, 100, 200, 150),
        (0, 50, 10**6, 10**6, 10**6),
        (0, 10**6, 50, 100, 200),
        (-5, 50, 100, 150, 200),
        (200, 150, 100, 50, 0),
        (0, 200, 0, 200, 0),
        (0, INT_MIN, INT_MAX, INT_MIN, 200),
        (INT_MAX,) * 5,
        (INT_MIN,) * 5,
        (0, 2**40, SMALL, BIG, 200),
        (SMALL, BIG, SMALL, BIG, SMALL),
    ],
    ids=str,
)
@pytest.mark.parametrize("times", [1, 9])  # 44 sequences: scheduled
def test_cu_seqlens(algorithm, name, bounds, times):
    call = ready(name, algorithm, lengths=(200, *[0] * (len(bounds) * times - 2)))
    wide = torch.int64 if max(map(abs, bounds)) > 2**31 else torch.int32
    call.inputs.cu_seqlens = torch.tensor(bounds * times, dtype=wide)
    arena, call, before = held(call)
    call()
    torch.cuda.synchronize()
    written = [tensor for key, tensor in call.results().items() if key != "pool"]
    if name == "pool":
        written += [call.inputs.initial_state[slot] for slot in call.inputs.initial_state_indices.tolist()]
    assert arena.changed_outside(before, written) == 0


@pytest.mark.skipif("sm90" not in device.able(torch.bfloat16), reason="sm90 does not run here")
@pytest.mark.parametrize(
    "bounds", [(0, 150, 100, 200, 150), (0, 50, 10**6, 10**6, 10**6), (-5, 50, 100, 150, 200)]
)
@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_cu_seqlens_of_one_kernel(bounds, times, gate):
    """Boxes, and rows where a sequence ends within one; of steep channels, tokens by themselves."""
    fields = {
        "decay": "mixed",
        "gate": gate,
        "gate_dtype": torch.bfloat16,
        "dtype": torch.bfloat16,
        "qk_l2norm": True,
    }
    fields |= {"key_dim": 128, "value_dim": 128, "backend": "sm90:fused"}
    call = ready("varlen", "kda", lengths=(200, *[0] * (len(bounds) * times - 2)), **fields)
    call.inputs.cu_seqlens = i32(bounds * times)
    arena, call, before = held(call)
    call()
    torch.cuda.synchronize()
    assert arena.changed_outside(before, list(call.results().values())) == 0


@pytest.mark.parametrize("name", PACKED)
def test_sequences_that_share_their_tokens(algorithm, name):
    """Many times more tokens in all than there are: more than any workspace of T tokens has room for."""
    N, T = 127, 200
    wrong = ready(name, algorithm, lengths=(T, *[0] * (N - 1)))
    wrong.inputs.cu_seqlens = i32([0, T] * ((N + 1) // 2))
    wrong()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["pool", "decode"])
@pytest.mark.parametrize("wrong", [INT_MAX, INT_MIN, -2, "slots"], ids=str)
@pytest.mark.parametrize("which", ["initial_state_indices", "final_state_indices"])
def test_state_indices(algorithm, name, wrong, which):
    right, call = ready(name, algorithm), ready(name, algorithm)
    right()
    bad, lengths = 2, right.inputs.case.lengths
    good = [n for n in range(len(lengths)) if n != bad]
    indices = call.inputs.initial_state_indices.clone()
    indices[bad] = len(call.inputs.initial_state) if wrong == "slots" else wrong
    if which == "initial_state_indices":
        call.inputs.initial_state_indices = indices
    else:
        call.named["final_state_indices"] = indices
    arena, call, before = held(call)
    call()
    pool, rows = call.inputs.initial_state, right.inputs.initial_state_indices[good].tolist()
    assert arena.changed_outside(before, [call.named["o"], *(pool[row] for row in rows)]) == 0
    assert_same_bits("states of the right rows", right.inputs.initial_state[rows], pool[rows])
    begin = sum(lengths[:bad])
    wanted = right.named["o"].flatten(0, 1)
    wanted[begin : begin + lengths[bad]] = 0
    assert_same_bits("o", wanted, call.named["o"].flatten(0, 1))


@pytest.mark.parametrize("name", ["verify", "tree"])
@pytest.mark.parametrize("wrong", [INT_MAX, INT_MIN, -1, 3], ids=str)
def test_snapshot_indices(algorithm, name, wrong):
    right, call = ready(name, algorithm), ready(name, algorithm)
    right()
    call.named["snapshot_indices"] = i32([2, wrong, 0])
    arena, call, before = held(call)
    call()
    room = call.named["snapshots"]
    assert arena.changed_outside(before, [call.named["o"], room[0], room[2]]) == 0
    assert_same_bits("o", right.named["o"], call.named["o"])
    assert_same_bits("snapshots", right.named["snapshots"][[2, 0]], room[[0, 2]])


@pytest.mark.parametrize("count", [0, -1, DRAFTS + 1, INT_MAX, INT_MIN])
@pytest.mark.parametrize("wrong", [0, INT_MAX, INT_MIN, -2, 3 * DRAFTS], ids=str)
def test_tables_of_slots(algorithm, count, wrong):
    """num_accepted out of range, and slots out of range in the table of a chain that lives in the pool."""
    call = ready("verify", algorithm)
    del call.named["snapshots"]
    call.inputs.initial_state = call.inputs.initial_state.repeat(DRAFTS, 1, 1, 1)
    table = torch.arange(3 * DRAFTS, dtype=torch.int32).view(3, DRAFTS)
    table[1, 1:] = wrong if wrong else table[1, 1:]
    call.named |= {"in_place": True, "state_indices": table, "num_accepted": i32([1, count, 2])}
    arena, call, before = held(call)
    call()
    pool = call.inputs.initial_state
    named = [slot for slot in table.flatten().tolist() if 0 <= slot < len(pool)]
    assert arena.changed_outside(before, [call.named["o"], *(pool[slot] for slot in named)]) == 0


@pytest.mark.parametrize("wrong", [1, 3, DRAFTS, INT_MAX, INT_MIN], ids=str)
def test_parents(algorithm, wrong):
    right, call = ready("tree", algorithm), ready("tree", algorithm)
    right()
    call.named["parents"][1, 1] = wrong
    arena, call, before = held(call)
    call()
    assert arena.changed_outside(before, call.results().values()) == 0
    for name in ("o", "snapshots"):
        assert_same_bits(name, right.named[name][[0, 2]], call.named[name][[0, 2]])


@pytest.mark.parametrize("column", [0, 1, 2], ids=["sequence", "tokens", "slot"])
@pytest.mark.parametrize("wrong", [INT_MAX, INT_MIN, -2, 1000, 63], ids=str)
def test_checkpoint_plan(algorithm, column, wrong):
    right, call = ready("states on the way", algorithm), ready("states on the way", algorithm)
    right()
    call.named["checkpoint_plan"][1, column] = wrong
    arena, call, before = held(call)
    call()
    kept = call.named["checkpoints"]
    others = [tensor for name, tensor in call.results().items() if name != "checkpoints"]
    assert arena.changed_outside(before, [*others, *(kept[slot] for slot in (0, 2, 3))]) == 0
    assert_same_bits("checkpoints", right.named["checkpoints"][[0, 2, 3]], kept[[0, 2, 3]])
    for name in ("o", "final_state", "chunk_states"):
        assert_same_bits(name, right.named[name], call.named[name])


def test_one_slot_for_two_rows(algorithm):
    """A promise that the caller broke: that slot's value is anybody's, all else is right."""
    right, call = ready("decode", algorithm), ready("decode", algorithm)
    right()
    call.inputs.initial_state_indices[1] = call.inputs.initial_state_indices[0]
    arena, call, before = held(call)
    call()
    pool, rows = call.inputs.initial_state, call.inputs.initial_state_indices.tolist()
    assert arena.changed_outside(before, [call.named["o"], *(pool[row] for row in rows)]) == 0
    assert_same_bits("o", right.named["o"][2:], call.named["o"][2:])
    assert_same_bits("states", right.inputs.initial_state[rows[2:]], pool[rows[2:]])
