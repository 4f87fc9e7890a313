# SPDX-License-Identifier: Apache-2.0
"""States of float8 at the sizes of GPUs: which kernels take them, and that they compute what those of float32
states do."""

from __future__ import annotations

import pytest
import torch

from cula_testing import device, level1
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits
from cula_testing.float8 import assert_stored, at, dequantised, pool_of, quantised

ALGORITHMS = "kda", "gdn", "lightning"


def pools(case: Case) -> tuple:
    """Inputs, a pool in float32 that float8 holds, and the same in float8 with its scales."""
    inputs = make(case)
    wide = inputs.initial_state
    wide.copy_(dequantised(*quantised(wide)))
    return inputs, wide, *pool_of(wide)


def decode(inputs, pool, **options):
    o, _ = level1.decode(inputs, pool, state_indices=inputs.initial_state_indices, **options)
    return o


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_decode_has_an_instance_of_its_own(algorithm, dim, rows):
    """With many rows and with few, which are cut into smaller CTAs."""
    case = Case(algorithm, (1,) * rows, pool=True, heads=8, value_heads=8, key_dim=dim, value_dim=dim)
    inputs, wide, pool, scales = pools(case)
    again, own = pool.clone(), scales.clone()
    names = device.kernels_of(lambda: decode(inputs, again, state_scales=own))
    assert len(names) == 1
    assert "recurrent::decode<" in names[0]
    assert "Float8E4M3" in names[0]
    expected, found = decode(inputs, wide), decode(inputs, pool, state_scales=scales)
    slots = inputs.initial_state_indices.tolist()
    assert_same_bits("o", expected, found)
    assert_stored(at(pool, slots), scales[slots], wide[slots])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rows", [2, 100])
def test_several_tokens_in_one_call(algorithm, rows):
    """Drafts, of which each leaves its state in a slot of its own."""
    tokens, dim = 6, 128
    case = Case(algorithm, (tokens,) * rows, heads=8, value_heads=8, key_dim=dim, value_dim=dim)
    inputs = make(case)
    wide = dequantised(*quantised(torch.randn(rows * tokens, 8, dim, dim)))
    pool, scales = pool_of(wide)
    table = torch.arange(rows * tokens, dtype=torch.int32).view(rows, tokens)
    expected, _ = level1.verify(inputs, wide, state_indices=table)
    found, _ = level1.verify(inputs, pool, state_indices=table, state_scales=scales)
    assert_same_bits("o", expected, found)
    assert_stored(pool, scales, wide)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_prefill_in_chunks_converts_its_states(algorithm):
    case = Case(algorithm, (300, 64, 0, 700), packed=True, pool=True, heads=4, value_heads=4, key_dim=128,
                value_dim=128)  # fmt: skip
    inputs, wide, pool, scales = pools(case)

    def call(states: torch.Tensor, **options: object) -> torch.Tensor:
        named = {"initial_state": None, "state_pool": states, "output_final_state": False}
        return level1.prefill(inputs, **named, **options)[0]

    expected, found = call(wide), call(pool, state_scales=scales)
    slots = inputs.initial_state_indices.tolist()
    assert_same_bits("o", expected, found)
    assert_stored(at(pool, slots), scales[slots], wide[slots])
    names = device.kernels_of(lambda: call(pool, state_scales=scales))
    assert "float8::load_states" in names[0]
    assert "float8::store_states" in names[-1]
    assert not any("recurrent::" in name for name in names)


def test_a_captured_decode_follows_its_pool():
    case = Case("kda", (1,) * 8, pool=True, key_dim=128, value_dim=128)
    inputs, wide, pool, scales = pools(case)
    before, scales_before, out = pool.clone(), scales.clone(), torch.empty_like(inputs.v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode(inputs, pool, state_scales=scales, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(inputs, pool, state_scales=scales, out=out)
    pool.copy_(before)
    scales.copy_(scales_before)
    for _ in range(3):
        expected = decode(inputs, wide)
        graph.replay()
        assert_same_bits("o", expected, out)
        slots = inputs.initial_state_indices.tolist()
        assert_stored(at(pool, slots), scales[slots], wide[slots])
        # Both go on from what was stored.
        wide[slots] = dequantised(at(pool, slots), scales[slots])
