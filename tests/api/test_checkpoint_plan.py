# SPDX-License-Identifier: Apache-2.0
"""Plans of checkpoints that are made on the device, against a loop on the host."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import cula
from cula._plans import one_state_each
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

KINDS = pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=["int32", "int64"])


def by_hand(lengths, interval, slots=None, seen=None, null_index=-1) -> list[list[int]]:
    """The used rows, in order; with `slots` None each has the number of its row."""
    rows, number = [], 0
    for n, length in enumerate(lengths):
        before = 0 if seen is None else seen[n]
        for boundary in range(interval, before + length + 1, interval):
            if boundary <= before:
                continue
            after, at = boundary - before, boundary // interval - 1
            slot, number = number, number + 1
            if slots is not None:
                slot = slots[n][at] if at < len(slots[n]) else -1
            if (after % 64 == 0 or after == length) and slot >= 0 and slot != null_index:
                rows.append([n, after, slot])
    return rows


def starts(lengths, kind=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=kind).cumsum(0).to(kind)


def used(plan: torch.Tensor) -> list[list[int]]:
    rows = plan.tolist()
    assert all(row == [0, 0, -1] for row in rows if row[2] < 0)
    return [row for row in rows if row[2] >= 0]


@given(
    lengths=st.lists(st.integers(0, 400), max_size=6),
    interval=st.sampled_from([64, 128, 192]),
    beyond=st.integers(0, 300),
    draw=st.randoms(use_true_random=False),
    pieces=st.booleans(),
    table=st.sampled_from(["none", "all", "some"]),
)
@KINDS
def test_rows(kind, lengths, interval, beyond, draw, pieces, table):
    n = len(lengths)
    seen = [draw.choice([0, 64, 128, draw.randrange(500)]) for _ in lengths] if pieces else None
    slots, width = None, 20 if table == "all" else 2
    if table != "none":
        slots = [[draw.randrange(-1, 50) for _ in range(width)] for _ in lengths]
    plan = cula.checkpoint_plan(
        starts(lengths, kind), interval,
        None if slots is None else torch.tensor(slots, dtype=kind).view(n, width),
        tokens=sum(lengths) + beyond, seen=None if seen is None else torch.tensor(seen, dtype=kind),
        null_index=7,
    )  # fmt: skip
    assert plan.dtype == (torch.int32 if slots is None else kind)
    assert plan.shape == ((sum(lengths) + beyond) // interval + (n if pieces and n else 0) if n else 0, 3)
    assert used(plan) == by_hand(lengths, interval, slots, seen, -1 if slots is None else 7)


@KINDS
def test_a_call_takes_the_plan(kind):
    """The states that are kept are those of calls that end there, a prompt in pieces included."""
    x = make(Case("gdn", (200, 0, 130), packed=True, tail=3))
    table = torch.tensor([[3, 1, 0], [4, 4, 4], [2, 0, 0]], dtype=kind)
    pool = torch.full((5, 2, 64, 64), float("nan"))
    plan = cula.checkpoint_plan(x.cu_seqlens, 128, table, tokens=x.q.shape[1], null_index=0)
    assert used(plan) == [[0, 128, 3], [2, 128, 2]]
    named = {"cu_seqlens": x.cu_seqlens, "initial_state": x.initial_state}
    cula.cula_gdn(x.q, x.k, x.v, x.g, x.beta, checkpoints=cula.Checkpoints(pool, plan), **named)
    untouched = [slot for slot in range(5) if pool[slot].isnan().all()]
    assert untouched == [0, 1, 4]
    for n, start, slot in ((0, 0, 3), (2, 200, 2)):
        one = [y[:, start : start + 128] for y in (x.q, x.k, x.v, x.g, x.beta)]
        _, state = cula.cula_gdn(*one, initial_state=x.initial_state[n : n + 1], output_final_state=True)
        assert torch.allclose(pool[slot], state[0], rtol=1e-2, atol=1e-2)

    # 64 tokens have been before: boundaries lie 64 tokens into the call, and 128 more.
    seen = torch.tensor([64, 64, 64], dtype=kind)
    plan = cula.checkpoint_plan(x.cu_seqlens, 128, table, tokens=x.q.shape[1], seen=seen, null_index=0)
    assert used(plan) == [[0, 64, 3], [0, 192, 1], [2, 64, 2]]


def test_a_pool_may_hold_its_own_checkpoints():
    """An engine's states and checkpoints are slots of one pool, which no call starts from and keeps to."""
    x = make(Case("kda", (150, 70), packed=True))
    pool, apart = torch.zeros(6, 2, 64, 64), torch.zeros(6, 2, 64, 64)
    slots = torch.tensor([4, 2], dtype=torch.int32)
    pool[slots.long()] = x.initial_state
    plan = cula.checkpoint_plan(x.cu_seqlens, 64, torch.tensor([[5, 1], [3, 3]]), tokens=x.q.shape[1])
    named = {"cu_seqlens": x.cu_seqlens}
    one, final = cula.cula_kda(
        x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True,
        checkpoints=cula.Checkpoints(apart, plan), **named,
    )  # fmt: skip
    two, _ = cula.cula_kda(
        x.q, x.k, x.v, x.g, x.beta, state_pool=pool, initial_state_indices=slots,
        checkpoints=cula.Checkpoints(pool, plan), **named,
    )  # fmt: skip
    assert_same_bits("o", one, two)
    assert_same_bits("ends", final, pool[slots.long()])
    assert_same_bits("kept", apart[[5, 1, 3]], pool[[5, 1, 3]])
    assert not pool[0].any()


@KINDS
def test_one_state_each(kind):
    tokens = torch.tensor([64, -1, 0, 128, 64], dtype=kind)
    assert one_state_each(tokens).tolist() == [[0, 64, 0], [0, 0, -1], [2, 0, 2], [3, 128, 3], [4, 64, 4]]
    slots = torch.tensor([5, 6, -1, 0, 8], dtype=kind)
    assert used(one_state_each(tokens, slots, 0)) == [[0, 64, 5], [4, 64, 8]]


def arguments(kind=torch.int32) -> tuple[torch.Tensor, ...]:
    return starts((200, 0, 130), kind), torch.arange(9, dtype=kind).view(3, 3), starts((64, 70), kind)


@pytest.mark.cpu_only("values of fake tensors are asked for on no device")
def test_no_value_is_read():
    """A fake tensor has no values: `item`, `tolist`, `nonzero` and a branch on one raise."""
    with FakeTensorMode() as mode:
        lengths, slots, seen = (mode.from_tensor(x) for x in arguments())
        with pytest.raises(DataDependentOutputException):
            lengths[0].item()
        assert cula.checkpoint_plan(lengths, 64, slots, tokens=330, seen=seen).shape == (8, 3)
        assert cula.checkpoint_plan(lengths, 64, tokens=330).shape == (5, 3)
        assert one_state_each(seen, slots[:, 0]).shape == (3, 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_one_graph(dynamic):
    lengths, slots, seen = arguments()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def plan(lengths, slots, seen, tokens):
        return cula.checkpoint_plan(lengths, 64, slots, tokens=tokens, seen=seen)

    for tokens in (330, 400):
        wanted = cula.checkpoint_plan(lengths, 64, slots, tokens=tokens, seen=seen)
        assert wanted.tolist() == plan(lengths, slots, seen, tokens).tolist()


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"cu_seqlens": [0, 1]}, TypeError, "cu_seqlens must be a tensor, got list"),
        ({"cu_seqlens": torch.zeros(2)}, ValueError, "cu_seqlens must have dtype int32 or int64"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, "cu_seqlens must have N + 1 >= 1"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, ValueError, "slots must have shape [N, S], got [2]"),
        ({"slots": torch.zeros(2, 1, dtype=torch.int32)}, ValueError,
         "slots must have a row for each of 3 sequences, got [2, 1]"),
        ({"seen": torch.zeros(3)}, ValueError, "seen must have dtype int32 or int64, got torch.float32"),
        ({"seen": torch.zeros(4, dtype=torch.int64)}, ValueError, "seen must have a row for each of 3"),
        ({"seen": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "seen must be on cu_seq"),
        ({"interval": 32}, ValueError, "interval must be a positive multiple of 64 tokens, got 32"),
        ({"interval": 0}, ValueError, "interval must be a positive multiple of 64 tokens, got 0"),
        ({"interval": 64.0}, TypeError, "interval must be of type int, got float"),
        ({"tokens": torch.tensor(3)}, TypeError, "tokens must be of type int, got Tensor"),
        ({"tokens": -1}, ValueError, "tokens must not be negative, got -1"),
        ({"tokens": 10**19}, ValueError, "tokens must fit 64 bits, got 10000000000000000000"),
        ({"interval": 2**64}, ValueError, "interval must fit 64 bits, got 18446744073709551616"),
        ({"null_index": True}, TypeError, "null_index must be of type int, got bool"),
        ({"null_index": -(2**63) - 1}, ValueError, "null_index must fit 64 bits, got -9223372036854775809"),
    ],
)  # fmt: skip
def test_refuses(wrong, error, words):
    lengths, slots, seen = arguments()
    named = {"cu_seqlens": lengths, "interval": 64, "slots": slots, "tokens": 330, "seen": seen}
    with pytest.raises(error, match=re.escape(words)):
        cula.checkpoint_plan(**{**named, **wrong})
