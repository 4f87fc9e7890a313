# SPDX-License-Identifier: Apache-2.0
"""Sequences that Hopper cuts in two: no bit changes. The first piece is carried beside its map, from which
the second starts."""

from __future__ import annotations

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

TOKENS = 64 * 80 - 3  # of the longest sequence

# 32 heads of all sequences together, whose value rows are 64 CTAs.
SHAPES = {
    "one": {"lengths": (TOKENS,), "heads": 16, "value_heads": 32},
    "batch": {"lengths": (TOKENS, TOKENS), "heads": 4, "value_heads": 16},
    "packed": {"lengths": (300, TOKENS - 64 * 5), "heads": 4, "value_heads": 16, "packed": True, "tail": 9},
    "null rows": {"lengths": (TOKENS, TOKENS), "heads": 4, "value_heads": 16, "pool": True},
    "no state": {"lengths": (TOKENS,), "heads": 32, "value_heads": 32, "state": False},
    "narrow states": {"lengths": (TOKENS,), "heads": 32, "value_heads": 32, "state_dtype": torch.bfloat16},
    "coupled": {"lengths": (TOKENS,), "heads": 32, "value_heads": 32, "keys": "collinear", "qk_l2norm": True},
}

pytestmark = pytest.mark.skipif("sm90" not in device.able(torch.bfloat16), reason="sm90 does not run here")


def inputs_of(algorithm: str, shape: str, seed: int = 0) -> Inputs:
    fields = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "seed": seed, **SHAPES[shape]}
    return make(Case(algorithm, **fields), draw_on="cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["gdn", "delta_per_head", "delta"])
def test_halves_change_no_bit(algorithm, shape):
    """The map of the first piece makes the state that the carry makes, by the same products; nothing here
    forgets."""
    inputs = inputs_of(algorithm, shape)
    cut = passes.prefill(inputs, backend="sm90:halves")
    whole = passes.prefill(inputs, backend="sm90:whole")
    assert_same_bits("o", cut.o, whole.o)
    assert_same_bits("final_state", cut.final_state, whole.final_state)


@pytest.mark.parametrize(("backend", "carries"), [("sm90:halves", 2), ("sm90:whole", 1)])
def test_what_is_cut(backend, carries):
    """Two kernels, the map's and the carry's, and none that composes."""
    inputs = inputs_of("gdn", "one")
    names = device.kernels_of(lambda: passes.prefill(inputs, backend=backend))
    assert sum("sm90::carry" in name for name in names) == carries
    assert not any("compose" in name for name in names)


@pytest.mark.parametrize("algorithm", ["gdn", "delta"])
def test_one_call_after_another(algorithm):
    """Calls that find the same workspace: no kernel reads what the call before left there."""
    cases = [inputs_of(algorithm, "coupled", seed) for seed in (0, 1)] + [inputs_of(algorithm, "one")]
    first = [passes.prefill(inputs, backend="sm90:halves") for inputs in cases]
    for _ in range(20):
        for inputs, expected in zip(cases, first, strict=True):
            again = passes.prefill(inputs, backend="sm90:halves")
            assert_same_bits("o", again.o, expected.o)
            assert_same_bits("final_state", again.final_state, expected.final_state)
