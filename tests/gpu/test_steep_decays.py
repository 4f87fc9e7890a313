# SPDX-License-Identifier: Apache-2.0
"""Decays per channel that take a block of 16 tokens, or a half of it, out of the range that factors have."""

from __future__ import annotations

import pytest
import torch

from cula_testing import passes
from cula_testing.cases import Case, make
from cula_testing.compare import errors

BLOCK = 16
# Natural log decays of a block's tokens: 8 of -12 are 2^-138. A half may decay by 2^-100, or 2^-4 in fp16.
PATTERNS = {
    "late half": [-0.01] * 8 + [-12.0] * 8,
    "early half": [-12.0] * 8 + [-0.01] * 8,
    "one token": [-0.01] * 11 + [-105.0] + [-0.01] * 4,
    "both halves": [-12.0] * 16,
    "all in turn": [-0.01] * 6 + [-30.0, -0.5] * 3 + [-2.0] * 4,
}
CLOSE = 1e-2  # to the walk of every token: one rounding of the operands is 2^-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("key_dim", [64, 128, 256])
@pytest.mark.parametrize("algorithm", ["kda", "gla"])
def test_outputs_are_those_of_every_token(algorithm, key_dim, pattern, dtype, backend):
    """One channel in four is steep: the others carry what is compared."""
    sizes = {"heads": 2, "value_heads": 2, "key_dim": key_dim, "value_dim": 128}
    case = Case(algorithm, (BLOCK * 20,), dtype=dtype, qk_l2norm=True, **sizes)
    inputs = make(case, draw_on="cuda")
    passes.skip_if_declined(lambda inputs, backend: passes.prefill(inputs, backend=backend), inputs, backend)
    g = torch.full_like(inputs.g, -0.01)
    g[..., ::4] = torch.tensor(PATTERNS[pattern], device="cuda").repeat(20)[None, :, None, None].to(g.dtype)
    inputs = inputs.but(g=g)
    found = passes.prefill(inputs, backend=backend)
    by_token = passes.prefill(inputs, backend="sm80:step")
    for name in ("o", "final_state"):
        one, two = getattr(found, name), getattr(by_token, name)
        assert errors(one, two.double()).rms < CLOSE, name


@pytest.mark.parametrize("key_dim", [64, 128, 256])
@pytest.mark.parametrize("algorithm", ["kda", "gla"])
def test_a_state_of_old_tokens_alone(algorithm, key_dim, backend):
    """The last token with a value decays by 2^-43 to the end, through a factor of its block that is below
    2^-126: the half that it ends decays by 2^-173."""
    sizes = {"heads": 2, "value_heads": 2, "key_dim": key_dim, "value_dim": 128}
    inputs = make(Case(algorithm, (50,), dtype=torch.bfloat16, qk_l2norm=True, **sizes), draw_on="cuda")
    passes.skip_if_declined(lambda inputs, backend: passes.prefill(inputs, backend=backend), inputs, backend)
    g, v = torch.full_like(inputs.g, -0.05), inputs.v.clone()
    g[:, [40, 41, 45, 46, 49]] = -30.0
    v[:, 47:] = 0
    zero = None if inputs.initial_state is None else torch.zeros_like(inputs.initial_state)
    inputs = inputs.but(g=g, v=v, initial_state=zero)
    found = passes.prefill(inputs, backend=backend).final_state
    by_token = passes.prefill(inputs, backend="sm80:step").final_state
    assert by_token.abs().max() > 2.0**-60
    assert errors(found, by_token.double()).rms < CLOSE
