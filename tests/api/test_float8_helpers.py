# SPDX-License-Identifier: Apache-2.0
"""States of float8 outside of a call: `quantize_states`, `dequantize_states`, `expand_state_scales`."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing.compare import assert_same_bits
from cula_testing.float8 import FLOAT8, dequantised, quantised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [True, False])
def test_quantize_and_back(dtype, v_first):
    states = (torch.randn(3, 2, 8, 16) * torch.logspace(-3, 3, 8)[:, None]).to(dtype)
    given = states if v_first else states.mT.contiguous()
    codes, scales = cula.quantize_states(given, state_v_first=v_first)
    wanted, wanted_scales = quantised(states.float())
    assert codes.dtype == FLOAT8
    assert codes.shape == given.shape
    assert_same_bits("codes", (codes if v_first else codes.mT).contiguous(), wanted)
    assert_same_bits("scales", scales, wanted_scales)
    back = cula.dequantize_states(codes, scales, state_v_first=v_first)
    assert_same_bits("states", back if v_first else back.mT, dequantised(wanted, wanted_scales))


def test_a_pool_that_was_quantized_here_is_what_a_call_reads_and_stores():
    codes, scales = cula.quantize_states(torch.randn(4, 2, 8, 64))
    before = codes.view(torch.uint8).clone()
    q, v = torch.empty(4, 0, 2, 64), torch.empty(4, 0, 2, 8)
    _, read = cula.cula_lightning(
        q, q, v, torch.zeros(2), initial_state=codes, state_scales=scales, output_final_state=True
    )
    assert_same_bits("states", read, cula.dequantize_states(codes, scales))
    cula.cula_lightning(q, q, v, torch.zeros(2), state_pool=codes, state_scales=scales)
    assert_same_bits("codes", codes.view(torch.uint8), before)


def test_rows_of_zeros_and_rows_that_are_not_finite():
    states = torch.ones(1, 4, 8)
    states[0, 1], states[0, 2, 3], states[0, 3, 5] = 0.0, float("nan"), -float("inf")
    codes, scales = cula.quantize_states(states)
    assert scales[0, 1] == 0
    assert scales[0, 2:].isnan().all()
    back = cula.dequantize_states(codes, scales)
    assert (back[0, 0] == 1).all()
    assert not back[0, 1].any()
    assert back[0, 2:].isnan().all()


@pytest.mark.parametrize("trailing", [False, True])
def test_one_scale_for_several_rows(trailing):
    scales = torch.rand(3, 2, 4)
    rows = cula.expand_state_scales(scales[..., None] if trailing else scales, 128)
    assert rows.shape == (3, 2, 128)
    assert rows.is_contiguous()
    for row in range(128):
        assert torch.equal(rows[..., row], scales[..., row // 32])
    rows.zero_()
    assert scales.all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: cula.quantize_states([1.0]), TypeError, "states must be a tensor, got list"),
        (lambda: cula.quantize_states(torch.zeros(2, 2).double()), ValueError, "states must have dtype"),
        (lambda: cula.quantize_states(torch.zeros(2)), ValueError, "states must have shape"),
        (lambda: cula.quantize_states(torch.zeros(2, 2), 0), TypeError,
         "quantize_states: state_v_first must be of type bool, got int"),
        (lambda: cula.dequantize_states(torch.zeros(2, 2).to(FLOAT8), torch.zeros(2), None), TypeError,
         "dequantize_states: state_v_first must be of type bool, got NoneType"),
        (lambda: cula.dequantize_states(torch.zeros(2, 2), torch.zeros(2)), ValueError,
         "codes must have dtype float8_e4m3fn"),
        (lambda: cula.dequantize_states(torch.zeros(2, 3).to(FLOAT8), torch.zeros(3)), ValueError,
         r"state_scales must be float32 of shape \[2\]"),
        (lambda: cula.dequantize_states(torch.zeros(2, 3).to(FLOAT8), 1.0), TypeError,
         "state_scales must be a tensor"),
        (lambda: cula.expand_state_scales(torch.zeros(2, 3), 6), ValueError, "scales must be float32 of"),
        (lambda: cula.expand_state_scales(torch.zeros(1, 2, 3), 7), ValueError,
         "value_dim must be a multiple of R = 3, got 7"),
        (lambda: cula.expand_state_scales(torch.zeros(1, 2, 3), "6"), TypeError, "value_dim must be of type"),
        (lambda: cula.expand_state_scales(None, 6), TypeError, "scales must be a tensor, got NoneType"),
    ],
)  # fmt: skip
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()
