# SPDX-License-Identifier: Apache-2.0
"""Gates per channel in any layout give the same bits: as tensor copies, as loads of 16 bytes, or one by
one."""

from __future__ import annotations

import pytest
import torch

from cula_testing import passes
from cula_testing.cases import Case, Inputs, make, strided
from cula_testing.compare import assert_same_bits

# Whole blocks of 16 tokens and others, in whole chunks of 64 and others.
SHAPES = {
    "one": {"lengths": (331,)},
    "batch": {"lengths": (150, 150)},
    "packed": {"lengths": (64, 5, 0, 79, 130), "packed": True, "tail": 20},
}
# Rows in wider ones, at whole pieces of 16 bytes, as a map and wide loads need them; at odd elements, that
# come singly.
PADS = (24, 3)


def results(inputs: Inputs, backend: str) -> dict[str, torch.Tensor]:
    whole, stateless = passes.prefill(inputs, backend=backend), inputs.but(initial_state=None)
    maps = passes.segment(stateless, backend=backend)
    return {"o": whole.o, "final_state": whole.final_state, "m": maps.m, "b": maps.b}


@pytest.mark.parametrize("gate", ["softplus", "bounded", "log_decay"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key_dim", [64, 72, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ["kda", "gla"])
def test_how_gates_come_changes_no_bit(algorithm, dtype, key_dim, shape, gate, backend):
    case = Case(
        algorithm,
        dtype=dtype,
        gate_dtype=dtype,
        gate=gate,
        heads=2,
        value_heads=4,
        key_dim=key_dim,
        value_dim=128,
        decay="mixed",
        qk_l2norm=True,
        scale=512.0,  # which leaves it to two kernels: the one that would do both takes gates as boxes alone
        **SHAPES[shape],
    )
    inputs = make(case, draw_on="cuda")
    first = results(inputs, backend)
    for pad in PADS:
        for name, found in results(inputs.but(g=strided(inputs.g, pad)), backend).items():
            assert_same_bits(name, first[name], found)
    # Numbers of 32 bits that are the same do not go by the path of 16 bits.
    wide = inputs.but(g=inputs.g.float(), case=case.but(gate_dtype=torch.float32))
    for name, found in results(wide, backend).items():
        assert_same_bits(name, first[name], found)
