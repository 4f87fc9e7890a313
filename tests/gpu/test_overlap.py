# SPDX-License-Identifier: Apache-2.0
"""Carries that start before the kernel before them has ended: each chunk is there when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import passes
from cases import Case, Inputs, make
from compare import assert_same_bits

# CTAs that prepare them are more than are resident at once, and not so many that a carry waits for the last to end.
MANY, FEW = 32, 8
SHAPES = {
    "one": {"lengths": (1500,)},
    "batch": {"lengths": (700, 700)},
    "packed": {"lengths": (600, 0, 1, 900), "packed": True, "tail": 9},
}


def inputs_of(algorithm: str, shape: str, heads: int) -> Inputs:
    fields = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, **SHAPES[shape]}
    return make(Case(algorithm, heads=heads, value_heads=heads, **fields), draw_on="cuda")


@contextmanager
def busy_device() -> Iterator[None]:
    """Another stream keeps multiprocessors from the calls, now more of them and now fewer."""
    side, matrix = torch.cuda.Stream(), torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(side):
        for i in range(400):
            matrix @ matrix[:, : 1024 >> i % 4]
    yield
    side.synchronize()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla", "delta"])
def test_heads_that_start_together_change_no_bit(algorithm, shape, backend):
    """Of few heads the carry waits for all images, of many for each."""
    inputs = inputs_of(algorithm, shape, MANY)
    alone = passes.prefill(inputs.first_heads(FEW), backend=backend, batch_invariant=True)
    for _ in range(20):
        whole = passes.prefill(inputs, backend=backend, batch_invariant=True)
        assert_same_bits("o", alone.o, whole.o[:, :, :FEW].contiguous())
        assert_same_bits("final_state", alone.final_state, whole.final_state[:, :FEW].contiguous())


@pytest.mark.parametrize("heads", [1, FEW, MANY, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla"])
def test_a_busy_device_changes_no_bit(algorithm, shape, heads, backend):
    inputs = inputs_of(algorithm, shape, heads)
    alone = passes.prefill(inputs, backend=backend)
    with busy_device():
        beside = [passes.prefill(inputs, backend=backend) for _ in range(20)]
    for result in beside:
        assert_same_bits("o", alone.o, result.o)
        assert_same_bits("final_state", alone.final_state, result.final_state)


@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla"])
def test_segments_beside_a_busy_device(algorithm, backend):
    """The states before segments are there when their carry starts from them."""
    fields = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    inputs = make(Case(algorithm, (6000,), heads=4, value_heads=4, **fields), draw_on="cuda")
    alone = passes.prefill(inputs, backend=backend)
    with busy_device():
        beside = [passes.prefill(inputs, backend=backend) for _ in range(20)]
    for result in beside:
        assert_same_bits("o", alone.o, result.o)
        assert_same_bits("final_state", alone.final_state, result.final_state)
