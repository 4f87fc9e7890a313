# SPDX-License-Identifier: Apache-2.0
"""Operators on states of float8 as PyTorch traces them: scales are written like the states."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits


def decode(inputs, pool, scales):
    o, _ = cula.cula_decode(
        inputs.q * 2, inputs.k, inputs.v, pool, mode="gdn", g=inputs.g, beta=inputs.beta,
        state_indices=inputs.initial_state_indices, state_scales=scales,
    )  # fmt: skip
    return o + 1


def prefill(inputs, pool, scales):
    return cula.cula_gdn(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=pool, state_scales=scales,
        initial_state_indices=inputs.initial_state_indices,
    )[0]  # fmt: skip


@pytest.mark.parametrize("call", [decode, prefill])
def test_compiled_is_eager(call):
    inputs = make(Case("gdn", (1, 1), pool=True))
    pool, scales = cula.quantize_states(inputs.initial_state.nan_to_num())
    pools = [(pool.clone(), scales.clone()) for _ in range(2)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits("o", call(inputs, *pools[0]), compiled(inputs, *pools[1]))
    assert_same_bits("pool", *(codes.view(torch.uint8) for codes, _ in pools))
    assert_same_bits("scales", *(own for _, own in pools))
    changed = not torch.equal(pools[0][1], scales)
    assert changed == (call is decode)


def test_writes_are_counted():
    """So that autograd notices where a tensor it needs was written."""
    inputs = make(Case("gdn", (1, 1), pool=True))
    pool, scales = cula.quantize_states(inputs.initial_state.nan_to_num())
    before = pool._version, scales._version
    prefill(inputs, pool, scales)
    assert (pool._version, scales._version) == before
    decode(inputs, pool, scales)
    assert pool._version > before[0]
    assert scales._version > before[1]


def test_scales_lie_where_the_inputs_do():
    inputs = make(Case("gdn", (1, 1), pool=True))
    pool, scales = cula.quantize_states(inputs.initial_state.nan_to_num())
    with pytest.raises(ValueError, match="initial_scales must be on q's device"):
        prefill(inputs, pool, scales.to("meta"))
