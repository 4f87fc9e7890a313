# SPDX-License-Identifier: Apache-2.0
"""Maps of chunks that forget what was before them: only the last ones are walked, and M is zero."""

from __future__ import annotations

import pytest
import torch

from cula_testing import passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import errors

TOKENS = 64 * 200
# Log decay per token of each head: none; one whose maps last for 18 chunks, or with a decay per channel, of
# which every fourth token's is looked at, 70; one chunk, or four; half a token.
DECAYS = (0.0, -0.04, -1.2, -150.0)
SHORT = slice(2, None)  # the heads whose segments begin behind what they forget
# One rounding of the operands is 2^-9: composed states are rounded elsewhere, and those of every token
# nowhere.
CLOSE, CLOSE_TO_EXACT = 6e-3, 1e-2


def inputs_of(algorithm: str, packed: bool, **fields) -> Inputs:
    lengths = (TOKENS - 64 * 60 - 5, 0, 64 * 60) if packed else (TOKENS,)
    heads = len(DECAYS)
    case = Case(
        algorithm, lengths, packed=packed, heads=heads, value_heads=heads, key_dim=128, value_dim=128,
        dtype=torch.bfloat16, qk_l2norm=True, beta_is_logit=True, **fields,
    )  # fmt: skip
    inputs = make(case, draw_on="cuda")
    decays = torch.tensor(DECAYS, device="cuda")
    if inputs.g is None:
        return inputs.but(decay=decays)
    shape = (1, 1, heads, 1)[: inputs.g.ndim]
    return inputs.but(g=decays.view(shape).expand_as(inputs.g).contiguous().to(inputs.g.dtype))


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "delta_per_head"])
def test_outputs_are_those_of_whole_walks(algorithm, packed, backend):
    inputs = inputs_of(algorithm, packed)
    cut = passes.prefill(inputs, backend=backend)
    whole = passes.prefill(inputs, backend=backend, batch_invariant=True)
    for name, dim in (("o", 2), ("final_state", 1)):
        one, two = (getattr(result, name).movedim(dim, 0) for result in (cut, whole))
        assert errors(one, two.double()).rms < CLOSE, name
        assert errors(one[SHORT], two[SHORT].double()).rms < 1e-6, (
            name
        )  # both start from the same last chunks


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "delta_per_head"])
def test_maps_are_those_of_every_token(algorithm, packed, backend):
    inputs = inputs_of(algorithm, packed).but(initial_state=None, initial_state_indices=None)
    found = passes.segment(inputs, backend=backend)
    by_token = passes.segment(inputs, backend="sm80:step")
    for head, decay in enumerate(DECAYS):
        one, two = (result.b[0, head] for result in (found, by_token))
        assert errors(one, two.double()).rms < CLOSE_TO_EXACT, decay
    assert not found.m[0, 1:].any()  # forgotten: exactly zero
    assert by_token.m[0, 1:].abs().max() < 2.0**-64
    assert found.m[0, 0].any()


@pytest.mark.parametrize("changes", [{"qk_l2norm": False}, {"beta_is_logit": False}])
def test_what_has_no_bound_is_walked(changes, backend):
    """Keys of any length, and write strengths beyond 2, may let a map grow however fast it decays."""
    inputs = inputs_of("gdn", False)
    inputs = inputs.but(case=inputs.case.but(**changes), initial_state=None, initial_state_indices=None)
    if "beta_is_logit" in changes:
        inputs = inputs.but(beta=torch.full_like(inputs.beta, 40.0))
    inputs = inputs.tokens(0, 256).but(g=torch.full_like(inputs.g[:, :256], -1.0))
    m = passes.segment(inputs, backend=backend).m
    assert m.isnan().any() or m.isinf().any() or m.any()
