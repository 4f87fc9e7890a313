# SPDX-License-Identifier: Apache-2.0
"""Inputs whose channels are not contiguous are taken wherever a user calls, and give the bits of contiguous
ones."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing import level1, passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

ROWS = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """As a convolution over tokens leaves them: T is the innermost dimension."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def turned(inputs, change):
    return inputs.but(
        **{name: change(getattr(inputs, name)) for name in ROWS if getattr(inputs, name) is not None}
    )


@pytest.mark.parametrize("change", [channels_first, every_second])
def test_prefill(algorithm, change):
    inputs = make(Case(algorithm, (70, 70)))
    wanted, found = level1.prefill(inputs), level1.prefill(turned(inputs, change))
    assert found[0].is_contiguous()
    for name, one, other in zip(("o", "final_state"), wanted, found, strict=True):
        assert_same_bits(name, one, other)


def test_packed_prefill_into_a_pool(algorithm):
    one, two = (make(Case(algorithm, (70, 0, 5), packed=True, pool=True)) for _ in range(2))
    o, out = passes.empty_o(one), passes.empty_o(two)
    for inputs, into in ((one, o), (turned(two, channels_first), out)):
        pool = {"state_pool": inputs.initial_state, "initial_state": None}
        level1.prefill(inputs, **pool, output_final_state=False, out=into)
    assert_same_bits("o", o, out)
    assert_same_bits("pool", one.initial_state, two.initial_state)


def test_decode_and_verify(algorithm):
    inputs = make(Case(algorithm, (4, 4)))
    other = turned(inputs, channels_first)
    states = inputs.initial_state.clone(), inputs.initial_state.clone()
    assert_same_bits("verified", level1.verify(inputs, states[0])[0], level1.verify(other, states[1])[0])
    for t in range(4):
        wanted, found = (
            level1.decode(each.tokens(t, t + 1), state)[0]
            for each, state in zip((inputs, other), states, strict=True)
        )
        assert_same_bits("o", wanted, found)
    assert_same_bits("state", *states)


def test_segment(algorithm):
    inputs = make(Case(algorithm, (70, 5), packed=True, state=False))
    for wanted, found in zip(
        level1.segment(inputs), level1.segment(turned(inputs, channels_first)), strict=True
    ):
        assert_same_bits("segment", wanted, found)


X = make(Case("kda", (70, 70), dtype=torch.float32))
DROP_INS = {
    "chunk_kda": lambda q, k, v, g, beta: cula.kda.chunk_kda(q, k, v, g, beta),
    "fused_recurrent_kda": lambda q, k, v, g, beta: cula.kda.fused_recurrent_kda(q, k, v, g, beta),
    "kda_prefill_hopper": lambda q, k, v, g, beta: cula.kda.kda_prefill_hopper(q, k, v, g, beta),
    "chunk_gated_delta_rule": lambda q, k, v, g, beta: cula.gdn.chunk_gated_delta_rule(
        q, k, v, g[..., 0], beta
    ),
    "fused_recurrent_gated_delta_rule": lambda q, k, v, g, beta: cula.gdn.fused_recurrent_gated_delta_rule(
        q, k, v, gk=g, beta=beta
    ),
    "chunk_gdn2": lambda q, k, v, g, _: cula.gdn2.chunk_gdn2(q, k, v, g, g.abs(), v.abs()),
    "chunk_dplr_delta_rule": lambda q, k, v, g, _: cula.generalized_delta_rule.chunk_dplr_delta_rule(
        q, k, v, -k, k, g
    ),
    "fused_recurrent_rwkv7": lambda q, k, v, g, _: cula.rwkv7.fused_recurrent_rwkv7(q, g, k, v, -k, k),
    "chunk_gla": lambda q, k, v, g, _: cula.gla.chunk_gla(q, k, v, g),
    "fused_recurrent_gla": lambda q, k, v, g, _: cula.gla.fused_recurrent_gla(q, k, v, g),
    "chunk_simple_gla": lambda q, k, v, g, _: cula.simple_gla.chunk_simple_gla(q, k, v, g[..., 0]),
    "chunk_delta_rule": lambda q, k, v, _, beta: cula.delta_rule.chunk_delta_rule(q, k, v, beta),
    "chunk_retention": lambda q, k, v, *_: cula.retention.chunk_retention(q, k, v),
    "chunk_lightning_attn": lambda q, k, v, *_: cula.lightning.chunk_lightning_attn(q, k, v, 1, 4),
}


@pytest.mark.parametrize("name", DROP_INS)
def test_drop_ins(name):
    rows = [getattr(X, each) for each in ROWS if each not in ("erase", "a_key", "b_key")]
    for change in (channels_first, every_second):
        assert_same_bits("o", DROP_INS[name](*rows)[0], DROP_INS[name](*map(change, rows))[0])


def test_of_a_compiled_model():
    rows = [channels_first(getattr(X, each)) for each in ROWS if each not in ("erase", "a_key", "b_key")]
    compiled = torch.compile(lambda *rows: cula.cula_kda(*rows)[0], fullgraph=True, backend="aot_eager")
    assert_same_bits("o", cula.cula_kda(*rows)[0], compiled(*rows))


def test_a_strided_output_is_refused():
    out = torch.full((*X.v.shape[:3], 2 * X.v.shape[3]), float("nan"))[..., ::2]
    with pytest.raises(ValueError, match="out must be contiguous in its last dimension, got stride 2"):
        level1.prefill(X, out=out)
    assert out.isnan().all()


def test_nothing_is_copied_for_a_call_that_is_refused():
    """The copy of this k would take 2^60 bytes."""
    for shape in ((2**20, 2**20, *X.k.shape[2:]), (*X.k.shape[:2], 2**40, X.k.shape[3])):
        with pytest.raises(ValueError, match=r"k must have shape \[B, T, H, K\]"):
            cula.cula_kda(X.q, torch.zeros(1).expand(shape), X.v, X.g, X.beta)
