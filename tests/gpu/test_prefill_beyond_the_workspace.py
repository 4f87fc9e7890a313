# SPDX-License-Identifier: Apache-2.0
"""Prefills whose chunks do not all fit the workspace at a time: slabs, one after another, that hand states
on."""

from __future__ import annotations

import pytest
import torch

from cula_testing import level1, passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits, errors

WIDE = {"dtype": torch.bfloat16, "gate_dtype": torch.bfloat16, "key_dim": 128, "value_dim": 128}
PART = 64  # heads whose chunks fit one slab; four times as many do not
pytestmark = pytest.mark.large


@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla", "lightning"])
@pytest.mark.parametrize(
    ("lengths", "packed"),
    [((8192, 8192), False), ((8192,), True), ((5000, 0, 4000, 64, 100), True)],
    ids=["batch", "one", "many"],
)
def test_slabs_change_no_bits(backend, algorithm, lengths, packed):
    heads = (
        4 * PART * (1 if algorithm in ("kda", "gla") else 4)
    )  # images are smaller where q and k stay as they are
    inputs = make(
        Case(algorithm, lengths, packed=packed, heads=heads, value_heads=heads, **WIDE), draw_on="cuda"
    )
    chunks = [-(-length // 64) for length in lengths]
    rows, columns = (1, sum(chunks)) if packed else (len(lengths), chunks[0])

    def prefill(inputs):
        room = passes.empty_states(inputs, rows * columns).unflatten(0, (rows, columns))
        return passes.prefill(inputs, backend=backend, batch_invariant=True, chunk_states=room)

    whole, alone = prefill(inputs), prefill(inputs.first_heads(PART))
    assert_same_bits("o", alone.o, whole.o[:, :, :PART].contiguous())
    for name in ("final_state", "chunk_states"):
        assert_same_bits(name, getattr(alone, name), getattr(whole, name)[..., :PART, :, :].contiguous())


@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla", "lightning"])
def test_segments_of_several_slabs(backend, algorithm):
    """Few heads, many tokens: segments are composed inside a slab, and the next slab goes on from there."""
    tokens = 1 << 19 if algorithm in ("kda", "gla") else 1 << 21
    inputs = make(Case(algorithm, (tokens,), heads=4, value_heads=4, **WIDE), draw_on="cuda")
    one = passes.prefill(inputs, backend=backend)
    two = passes.prefill(inputs, backend=backend, batch_invariant=True)
    for name in ("o", "final_state"):  # within one rounding of the operands, which is 2^-9
        assert errors(getattr(one, name), getattr(two, name).double()).rms < 2e-3, name


@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla", "lightning"])
def test_maps_of_several_slabs_without_m(backend, algorithm):
    """A later slab goes on from the call's own B, and from its M if there is one."""
    heads = 4 * PART * (1 if algorithm in ("kda", "gla") else 4)
    inputs = make(Case(algorithm, (16384,), heads=heads, value_heads=heads, **WIDE), draw_on="cuda")
    inputs = inputs.but(initial_state=None)
    _, b = level1.segment(inputs, backend=backend)
    _, alone = level1.segment(inputs, backend=backend, out=(None, torch.full_like(b, float("nan"))))
    assert_same_bits("b", alone, b)
