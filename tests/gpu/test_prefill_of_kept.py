# SPDX-License-Identifier: Apache-2.0
"""What a segment keeps of long sequences: a prefill goes on from pieces, which CTAs of every width walk."""

from __future__ import annotations

import pytest
import torch

from cula_testing import level1
from cula_testing.cases import Case, make
from cula_testing.compare import errors

WIDE = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize("heads", [4, 16, 32])
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla", "lightning"])
def test_pieces_are_the_whole(algorithm, heads):
    inputs = make(Case(algorithm, (20000,), heads=heads, value_heads=heads, **WIDE), draw_on="cuda")
    _, _, kept = level1.segment(inputs.but(initial_state=None), scale=inputs.case.scale, keep=True)
    whole = level1.prefill(inputs, deterministic="batch_invariant")
    pieces = level1.prefill(inputs, kept=kept)
    for name, one, two in zip(("o", "final_state"), pieces, whole, strict=True):
        assert errors(one, two.double()).rms < 2e-3, name  # one rounding of the operands is 2^-9
