# SPDX-License-Identifier: Apache-2.0
"""Sequences that Hopper cuts into segments: results are those of one carry. The first segment is
carried beside the maps of the others."""

from __future__ import annotations

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits, errors

CHUNKS = 200
TOKENS = 64 * CHUNKS - 3
FIRST = 64 * 40  # tokens of the first of five segments

SHAPES = {
    "one": {"lengths": (TOKENS,), "heads": 4, "value_heads": 16},
    "batch": {"lengths": (TOKENS, TOKENS), "heads": 8, "value_heads": 8},
    "null rows": {"lengths": (TOKENS, TOKENS), "heads": 4, "value_heads": 8, "pool": True},
    "no state": {"lengths": (TOKENS,), "heads": 16, "value_heads": 16, "state": False},
    "narrow states": {"lengths": (TOKENS,), "heads": 16, "value_heads": 16, "state_dtype": torch.bfloat16},
    "few channels": {"lengths": (TOKENS,), "heads": 16, "value_heads": 16, "key_dim": 40},
    "float16": {"lengths": (TOKENS,), "heads": 16, "value_heads": 16, "dtype": torch.float16},
    "four segments": {"lengths": (TOKENS,), "heads": 22, "value_heads": 22},
    "slabs": {"lengths": (64 * 2500 - 3,), "heads": 16, "value_heads": 16},
}
# One rounding of the operands is 2^-9: composed states are rounded elsewhere.
CLOSE = 6e-3

pytestmark = pytest.mark.skipif("sm90" not in device.able(torch.bfloat16), reason="sm90 does not run here")


def inputs_of(shape: str, seed: int = 0) -> Inputs:
    """Heads that remember everything, and such that forget within some tokens."""
    fields = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "seed": seed, "qk_l2norm": True}
    inputs = make(Case("kda", **{**fields, **SHAPES[shape]}), draw_on="cuda")
    heads = torch.arange(inputs.g.shape[2], device="cuda").view(1, 1, -1, 1)
    return inputs.but(g=(inputs.g.abs() * torch.where(heads % 2 == 0, -1e-5, -0.5)).to(inputs.g.dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_segments_are_one_carry(shape):
    inputs = inputs_of(shape)
    cut = passes.prefill(inputs, backend="sm90:segments")
    whole = passes.prefill(inputs, backend="sm90:whole")
    if shape != "slabs":
        assert_same_bits(
            "o of the first segment", cut.o[:, :FIRST].contiguous(), whole.o[:, :FIRST].contiguous()
        )
    assert not torch.equal(cut.o, whole.o)  # or nothing was cut
    assert errors(cut.o, whole.o.double()).rms < CLOSE
    assert errors(cut.final_state, whole.final_state.double()).rms < CLOSE


@pytest.mark.parametrize(("backend", "carries", "composes"), [("sm90:segments", 3, 1), ("sm90:whole", 1, 0)])
def test_what_is_cut(backend, carries, composes):
    inputs = inputs_of("one")
    names = device.kernels_of(lambda: passes.prefill(inputs, backend=backend))
    assert sum("sm90::carry" in name for name in names) == carries
    assert sum("compose" in name for name in names) == composes


def test_one_call_after_another():
    """Calls that find the same workspace: no kernel reads what the call before left there, or comes too
    early."""
    cases = [
        inputs_of(shape, seed) for shape, seed in (("one", 0), ("one", 1), ("no state", 0), ("batch", 0))
    ]
    first = [passes.prefill(inputs, backend="sm90:segments") for inputs in cases]
    for _ in range(20):
        for inputs, expected in zip(cases, first, strict=True):
            again = passes.prefill(inputs, backend="sm90:segments")
            assert_same_bits("o", again.o, expected.o)
            assert_same_bits("final_state", again.final_state, expected.final_state)
