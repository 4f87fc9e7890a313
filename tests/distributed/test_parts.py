# SPDX-License-Identifier: Apache-2.0
"""What cula.dist is made of, without other processes: shards of tokens and of heads, maps, the cost model,
pools."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cula import cula_kda, quantize_states
from cula import dist as level2
from cula.dist import (
    alloc_decode_state_pool,
    alloc_state_buffer,
    context,
    cost,
    cula_kda_tp,
    even_splits,
    hybrid,
    split_cu_seqlens_for_sp,
    tensor,
)
from cula.dist.calls import FUNCTIONS, Call
from cula.dist.forms import Complete
from cula.dist.lanes import PackedLane
from cula.dist.messages import Message
from cula.dist.shards import TokenShard
from cula.dist.words import ContextWords, HybridWords, TensorWords
from cula_testing import passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

pytestmark = pytest.mark.cpu_only("host side; the ranks' tests run on GPUs too")


@pytest.mark.parametrize("name", [name for name in level2.__all__ if name.startswith("cula_")])
def test_every_function_says_what_it_takes(name):
    """The tensors of the Level 1 function by position, or by name where it has them so, and the words of its
    kind of parallelism, alike for all."""
    function = getattr(level2, name)
    mode = next(mode for mode in sorted(FUNCTIONS, key=len, reverse=True) if name.startswith(f"cula_{mode}_"))
    level1 = inspect.signature(FUNCTIONS[mode]).parameters
    kda = inspect.signature(getattr(level2, name.replace(mode, "kda", 1))).parameters
    parameters = inspect.signature(function).parameters

    by_name = [each for each in level1.values() if each.kind is each.KEYWORD_ONLY]
    tensors = {"decay", *(each.name for each in by_name if each.default is each.empty)}
    assert tensors - {"decay"} <= parameters.keys()

    def words(of):
        return {
            each
            for each in of.values()
            if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name not in tensors
        }

    def positions(of):
        return [(each.name, each.default) for each in of.values() if each.kind is each.POSITIONAL_OR_KEYWORD]

    assert positions(parameters) == positions(level1)
    assert words(parameters) == words(kda)
    assert function.__doc__


@pytest.mark.parametrize(
    ("form", "known", "refused"),
    [
        (tensor.tensor_parallel, TensorWords, ()),
        (context.context_parallel, ContextWords, context._ONE_RANK_ONLY),
        (hybrid.hybrid_parallel, HybridWords, context._ONE_RANK_ONLY),
    ],
)
def test_type_checkers_know_every_keyword(form, known, refused):
    def keywords(function):
        parameters = inspect.signature(function).parameters.values()
        return {
            each.name
            for each in parameters
            if each.kind is each.KEYWORD_ONLY and each.default is not each.empty  # else it is a tensor
        }

    options = set().union(*map(keywords, FUNCTIONS.values())) - {"decay", *refused}
    assert known.__optional_keys__ == keywords(form) | options


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    size=st.integers(1, 5),
    tail=st.integers(0, 3),
    data=st.data(),
)
def test_shards_of_packed_tokens(lengths, size, tail, data):
    total = sum(lengths) + tail
    sequence_of = [n for n, length in enumerate(lengths) for _ in range(length)] + [None] * tail
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    borders = data.draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1))
    splits = data.draw(st.sampled_from([even_splits(total, size), [0, *sorted(borders), total]]))
    for rank in range(size):
        begin, end = splits[rank], splits[rank + 1]
        held = sequence_of[begin:end]
        if splits == even_splits(total, size):
            local, before = split_cu_seqlens_for_sp(cu_seqlens, rank, size, total)
            assert local.diff().tolist() == [held.count(n) for n in range(len(lengths))]
            assert before.tolist() == [sequence_of[:begin].count(n) for n in range(len(lengths))]
        shard = TokenShard.of(cu_seqlens, splits, rank)
        assert shard.cu_seqlens.diff().tolist() == [held.count(n) for n in range(len(lengths))]

        def across(border: int) -> int:
            if 0 < border < total and sequence_of[border - 1] == sequence_of[border] is not None:
                return sequence_of[border]
            return -1

        assert shard.crossing.tolist() == [across(border) for border in splits]
        leaves = across(end)
        skipped = len(held) - held.count(leaves)
        expected = [0, 0, 0] if leaves < 0 else [0, skipped, len(held)]
        assert shard.leaving_cu_seqlens.tolist() == expected
        ends = cu_seqlens[1:].tolist()
        assert shard.final_ranks.tolist() == [
            next(r for r in range(size) if splits[r + 1] >= e) for e in ends
        ]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), size=st.integers(1, 5))
def test_shards_of_a_rank_that_knows_its_own_sequences_alone(lengths, size):
    """As of all sequences, but for the names of rows: what enters and leaves, and which ranks it comes
    from."""
    lengths[-1] += -sum(lengths) % size
    share, cu_seqlens = sum(lengths) // size, torch.tensor([0, *lengths]).cumsum(0)
    for rank in range(size):
        begin, end = rank * share, (rank + 1) * share
        whole = PackedLane(TokenShard.of(cu_seqlens, even_splits(sum(lengths), size), rank), rank)
        starts = [c for c in cu_seqlens.tolist() if begin < c < end]
        first = max(c for c in cu_seqlens.tolist() if c <= begin)
        last = min(c for c in cu_seqlens.tolist() if c >= end)
        before, after = rank - first // share, (last - 1) // share - rank
        local = torch.tensor([0, *(c - begin for c in starts), share])
        shard = TokenShard.beside(local, rank, size, before, after, share)
        own, rows = PackedLane(shard, rank), len(local) - 1
        assert shard.leaving_cu_seqlens.tolist() == whole._leaving_cu_seqlens.tolist()
        for here, there in ((own, whole), (own.back, whole.back)):
            assert (here._entering >= 0) == (there._entering >= 0)
            assert here._entering < 0 or here.joins().tolist() == there.joins().tolist()
        assert own._entering in (-1, 0)
        assert own.back._entering in (-1, rows - 1)


def test_wrong_cu_seqlens():
    good = torch.tensor([0, 4, 9])
    for cu_seqlens, error, message in (
        ([0, 4], TypeError, "cu_seqlens must be a tensor, got list"),
        (good.float(), ValueError, "cu_seqlens must have dtype int32 or int64"),
        (good[:1], ValueError, r"cu_seqlens must have shape \[N \+ 1\], got \[1\]"),
        (good + 1, ValueError, "cu_seqlens must ascend from 0"),
        (good + good, ValueError, "cu_seqlens must end at or before the 9 tokens"),
    ):
        with pytest.raises(error, match=message):
            split_cu_seqlens_for_sp(cu_seqlens, 0, 2, 9)


def compose(m: torch.Tensor, b: torch.Tensor, joins: torch.Tensor | None = None) -> torch.Tensor:
    state = torch.empty_like(b[0])
    torch.ops.cula.compose(m, b, state, joins)
    return state


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_what_lowers_the_precision_of_products_does_not_lower_that_of_maps(precision):
    torch.manual_seed(0)
    m, b = (torch.randn(3, 1, 2, 64, 64) / 8 for _ in range(2))
    precise = compose(m, b)
    torch.set_float32_matmul_precision(precision)
    try:
        assert_same_bits("state", compose(m, b), precise)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("rows", [8, 1])
def test_maps_compose_in_order(rows):
    """Three maps of two heads, by hand; what `joins` cuts off does not matter, not even a NaN."""
    torch.manual_seed(0)
    m, b = (torch.randn(3, 1, 2, size, 8, dtype=torch.float64) for size in (rows, 4))  # m: transposed

    def after(n: int, state: torch.Tensor) -> torch.Tensor:
        return (state * m[n] if rows == 1 else state @ m[n]) + b[n]

    assert_same_bits("one", compose(m[:1], b[:1]), b[0])
    torch.testing.assert_close(compose(m, b), after(2, after(1, b[0])))
    joins = torch.tensor([False, True, True])
    cut = [x.clone() for x in (m, b)]
    cut[0][:2], cut[1][:1] = float("nan"), float("nan")
    torch.testing.assert_close(compose(*cut, joins), after(2, b[1]))
    assert not compose(m, b, joins.flip(0)).any()
    state = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    torch.ops.cula.compose(m[:0], b[:0], state)
    assert not state.any()


@pytest.mark.parametrize("lanes", [3, 0])
@pytest.mark.parametrize(("delta", "key_dim"), [(True, 8), (True, 6), (True, 1), (False, 7), (False, 1)])
def test_messages_hold_maps_as_they_are_written_and_composed(delta, key_dim, lanes):
    torch.manual_seed(0)
    q, v = torch.zeros(1, 5, 2, key_dim, dtype=torch.float64), torch.zeros(1, 5, 2, 4, dtype=torch.float64)
    call = Call("a call", "kda" if delta else "gla", q, q, v)
    message = Message.empty(call, lanes)
    m = torch.randn(lanes, 2, key_dim, key_dim if delta else 1, dtype=torch.float64)
    b, start = (torch.randn(lanes, 2, 4, key_dim, dtype=torch.float64) for _ in range(2))
    message.written_m.copy_(m if delta else m[..., 0])
    message.b.copy_(b)
    after = (start @ m.mT if delta else start * m.mT) + b
    twice = (after @ m.mT if delta else after * m.mT) + b
    torch.testing.assert_close(message.m, m.mT)
    message.start_from(start)
    torch.testing.assert_close(message.b, after)
    second = dataclasses.replace(message, whole=message.whole.clone())
    second.b.copy_(b)
    torch.testing.assert_close(message.compose(torch.stack((message.whole, second.whole)), None), twice)
    end = message.whole[len(message.whole) - message.b_count :]
    assert_same_bits("the end is b", end.view(message.b_shape)[..., :key_dim], message.b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": torch.zeros(2, 1, 2, 9, 8)}, r"m must have shape \[P, N, HV, K, K\] or \[P, N, HV, 1, K\] of"),
        ({"b": torch.zeros(3, 1, 2, 4, 8)}, r"b must have shape \[P, N, HV, V, K\] of m's P"),
        ({"m": torch.zeros(2, 1, 2, 8, 8, dtype=torch.float16)}, "m must have dtype float32 or float64"),
        (
            {"b": torch.zeros(2, 1, 2, 4, 8, dtype=torch.float64)},
            "b must have state's dtype, float32, got float64",
        ),
        (
            {"m": torch.zeros(2, 1, 2, 8, 16)[..., ::2]},
            "m must have a contiguous last dimension, got a stride of 2",
        ),
        ({"state": torch.zeros(2, 4, 8)}, r"state must have shape \[N, HV, V, K\]"),
        ({"joins": torch.ones(3, dtype=torch.bool)}, r"joins must have shape \[P\] = \[2\]"),
        ({"joins": torch.ones(2)}, "joins must have dtype bool, got float32"),
        ({"joins": torch.ones(4, dtype=torch.bool)[::2]}, "joins must be contiguous, got a stride of 2"),
        ({"state": torch.zeros(1, 1, 4, 8).expand(1, 2, 4, 8)}, "state must not overlap itself in memory"),
    ],
)
def test_compose_names_what_is_wrong(changes, message):
    right = {
        "m": torch.zeros(2, 1, 2, 8, 8),
        "b": torch.zeros(2, 1, 2, 4, 8),
        "state": torch.zeros(1, 2, 4, 8),
    }
    with pytest.raises(ValueError, match=f"compose: {message}"):
        torch.ops.cula.compose(**{**right, **changes})


def test_tensor_parallelism_needs_no_group():
    case = Case("kda", (40,), heads=4, value_heads=4)
    inputs = make(case).double()
    whole = passes.prefill(inputs, backend="reference")
    for rank in range(2):
        o, final = cula_kda_tp(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state,
            tp_size=2, tp_rank=rank, full_inputs=True, output_final_state=True, backend="reference",
        )  # fmt: skip
        assert_same_bits("o", o, whole.o[:, :, 2 * rank : 2 * rank + 2])
        assert_same_bits("final_state", final, whole.final_state[:, 2 * rank : 2 * rank + 2])
    for wrong, message in (
        ({"tp_size": 2}, "tp_rank must be given with tp_size"),
        ({"tp_size": 2, "tp_rank": 2}, r"tp_rank must lie in \[0, 2\), got 2"),
        ({"tp_size": 0, "tp_rank": 0}, "tp_size must be at least 1, got 0"),
        ({"tp_size": 2, "tp_rank": 0, "gather_output": True}, "tp_group must be given with gather_output"),
    ):
        with pytest.raises(ValueError, match=message):
            cula_kda_tp(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, **wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"g": 3.0}, "g must be a tensor, got float"),
        ({"k": None, "full_inputs": True}, "k must be a tensor, got NoneType"),
        ({"checkpoints": 3}, r"checkpoints must be Checkpoints\(states, plan\), got int"),
        ({"checkpoints": (1, 2)}, "checkpoints.states must be a tensor, got int"),
        ({"full_inputs": "no"}, "full_inputs must be of type bool, got str"),
        ({"full_qk": 1}, "full_qk must be of type bool, got int"),
        ({"gather_output": "no"}, "gather_output must be of type bool, got str"),
    ],
)
def test_types_of_tensor_parallelism(changes, message):
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(TypeError, match=message):
        cula_kda_tp(**{"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], **changes})


def test_wrong_heads_of_tensor_parallelism():
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(TypeError, match="decay must be a tensor, got float"):
        level2.cula_lightning_tp(x, x, x, 0.5)
    with pytest.raises(ValueError, match=r"k must have shape \[B, T, H, K\], got \[8, 2, 16\]"):
        cula_kda_tp(x, x[0], x, x, x[..., 0], full_inputs=True)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((5, 0), ValueError, "size must be at least 1, got 0"),
        ((-1, 2), ValueError, "tokens must be at least 0, got -1"),
        ((5.0, 2), TypeError, "tokens must be of type int, got float"),
        ((5, True), TypeError, "size must be of type int, got bool"),
    ],
)
def test_wrong_splits(given, error, message):
    with pytest.raises(error, match=message):
        even_splits(*given)


@pytest.mark.parametrize(("mode", "writes"), [("kda", 1), ("gdp", 2)])
def test_a_rank_without_a_sequence_has_zeros_for_each_token(mode, writes):
    """Also where v has several rows for each."""
    q, k = torch.zeros(1, 3, 2, 16), torch.zeros(1, 3 * writes, 2, 16)
    v = torch.zeros(1, 3 * writes, 4, 8, dtype=torch.bfloat16)
    form = Complete(None, torch.zeros(1, dtype=torch.int32), 2, 2, "end")
    made = form.forward(Call("a call", mode, q, k, v), None)
    assert_same_bits("o", made.o, v.new_zeros(1, 3, 4, 8))
    assert made.final_state.shape == (0, 4, 8, 16)


def test_a_gate_of_all_channels_beside_a_bias_of_each_has_one_gradient():
    inputs = make(Case("kda", (20,), key_dim=8, value_dim=8, gate="softplus", state=False)).double()
    g, dt_bias = (x.clone().requires_grad_() for x in (inputs.g[..., 0], inputs.dt_bias))
    named = {"use_gate_in_kernel": True, "A_log": inputs.A_log, "dt_bias": dt_bias}
    call = Call("a call", "kda", inputs.q, inputs.k, inputs.v, g, inputs.beta, options=named)
    o, _ = call.run()
    expected = torch.autograd.grad(o, (g, dt_bias), torch.ones_like(o))
    with torch.no_grad():
        found = call.gradients({"g", "dt_bias"}, None, None, torch.ones_like(o), None)
    for name, gradient in zip(("g", "dt_bias"), expected, strict=True):
        assert_same_bits(f"d_{name}", found[name], gradient)


LONG = cost.Size(
    ranks=4, tokens=32768, lanes=1, value_heads=32, key_dim=128, value_dim=128, delta=True, keeps=True
)
PACKED = dataclasses.replace(LONG, keeps=False)


def test_the_cost_model():
    def choice(size: cost.Size, **changes: int) -> str:
        return cost.choose(dataclasses.replace(size, **changes))

    assert (LONG.state_bytes, LONG.map_bytes) == (2 << 20, 4 << 20)
    assert dataclasses.replace(LONG, delta=False).map_bytes == (2 << 20) * 129 // 128
    assert choice(LONG) == choice(LONG, ranks=2) == choice(PACKED) == "scan"
    assert choice(LONG, ranks=2, tokens=16) == choice(LONG, ranks=1) == "ring"
    # Of two ranks that keep nothing the last waits for the first either way, and the ring's message is
    # smaller.
    assert choice(PACKED, ranks=2) == "ring"


def test_estimates_are_sums_of_their_parts():
    machine = cost.Machine()
    prefill, segment, exchange = (
        estimate(LONG, machine) for estimate in (cost.prefill_us, cost.segment_us, cost.exchange_us)
    )
    assert segment - prefill == pytest.approx(2 * machine.cut * LONG.token_heads - machine.walk * LONG.tokens)
    assert cost.scan_us(PACKED, machine) == segment + exchange + prefill
    twice = 2 * (machine.call + machine.cut * LONG.token_heads)
    assert cost.scan_us(LONG, machine) == pytest.approx(machine.prepare * LONG.token_heads + twice + exchange)
    assert cost.ring_us(dataclasses.replace(LONG, ranks=1), machine) == prefill


def test_a_carry_is_whole_while_its_heads_have_room_and_cut_where_they_are_few():
    machine = cost.Machine()

    def per_token(heads: int) -> float:
        return cost.carry_us(dataclasses.replace(LONG, value_heads=heads), machine) / LONG.tokens

    assert per_token(8) == pytest.approx(2 * 8 * machine.cut)
    assert per_token(32) == pytest.approx(machine.walk)
    assert per_token(96) == pytest.approx(96 * machine.cut)
    few = dataclasses.replace(LONG, value_heads=8)  # a segment that keeps nothing is not cut
    assert cost.segment_us(few, machine) - cost.prefill_us(few, machine) == pytest.approx(
        (machine.walk - 2 * 8 * machine.cut) * LONG.tokens
    )


RESULTS = Path(__file__).parents[2] / "bench/results/nvidia-h200"
MEASURED = [
    pytest.param(row, id=f"{path.stem}-{row['case']}-{row['impl']}")
    for path in sorted(RESULTS.glob("dist_x*.json"))
    for row in json.loads(path.read_text())["cases"]
    if row["op"] == "kda" and row["impl"] in ("cula:scan", "cula:ring") and row["gpu_ms"] is not None
]
assert {(row["impl"], row["gpus"]) for (row,) in (each.values for each in MEASURED)} == {
    (f"cula:{x}", n) for x in ("scan", "ring") for n in (2, 4)
}


@pytest.mark.parametrize("row", MEASURED)
def test_estimates_are_near_what_was_measured(row):
    heads, ranks = row["value_heads"], row["gpus"]
    size = dataclasses.replace(LONG, ranks=ranks, tokens=row["tokens"] // ranks, value_heads=heads)
    estimate = {"cula:scan": cost.scan_us, "cula:ring": cost.ring_us}[row["impl"]](size, cost.Machine())
    assert estimate == pytest.approx(1e3 * row["gpu_ms"], rel=0.1)


def test_ranks_write_their_heads_of_a_float8_pool():
    """Of states and of scales."""
    inputs = make(Case("kda", (70, 70), heads=4, value_heads=4))
    whole = quantize_states(inputs.initial_state)
    cut = tuple(x.clone() for x in whole)
    named = {"g": inputs.g, "beta": inputs.beta, "initial_state_indices": torch.tensor([1, 0])}
    q, k, v = inputs.q, inputs.k, inputs.v
    o, _ = cula_kda(q, k, v, **named, state_pool=whole[0], state_scales=whole[1])
    parts = [
        level2.cula_kda_tp(
            q, k, v, **named, state_pool=cut[0], state_scales=cut[1], tp_size=2, tp_rank=rank,
            full_inputs=True,
        )[0]
        for rank in range(2)
    ]  # fmt: skip
    assert_same_bits("o", o, torch.cat(parts, 2))
    assert_same_bits("codes", whole[0].view(torch.uint8), cut[0].view(torch.uint8))
    assert_same_bits("scales", whole[1], cut[1])


ALLOCATORS = (alloc_state_buffer, alloc_decode_state_pool)


@pytest.mark.parametrize("allocate", ALLOCATORS)
def test_a_rank_gets_its_heads_v_first(allocate):
    states = allocate(3, 8, 64, 32, tp_size=4, dtype=torch.bfloat16, device="cpu")
    assert (states.shape, states.dtype) == ((3, 2, 32, 64), torch.bfloat16)
    assert not states.any()
    assert allocate(0, 8, 64, 32, device="cpu").shape == (0, 8, 32, 64)


@pytest.mark.parametrize("allocate", ALLOCATORS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 6}, "num_heads must be a multiple of tp_size, 4, got 6"),
        ({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        ({"head_dim_k": 0}, "head_dim_k must be at least 1, got 0"),
        ({"head_dim_v": -1}, "head_dim_v must be at least 1, got -1"),
        ({"dtype": torch.int32}, "dtype must be float32, bfloat16 or float16, got torch.int32"),
    ],
)
def test_wrong_arguments(allocate, changes, message):
    given = {"num_heads": 8, "head_dim_k": 64, "head_dim_v": 64, "tp_size": 4, **changes}
    with pytest.raises(ValueError, match=message):
        allocate(2, **given, device="cpu")
    with pytest.raises(ValueError, match="must not be negative, got -2"):
        allocate(-2, 8, 64, 64, device="cpu")
