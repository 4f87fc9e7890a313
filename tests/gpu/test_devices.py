# SPDX-License-Identifier: Apache-2.0
"""Several devices, and none."""

from __future__ import annotations

import os

import pytest
import torch

import cula
from cula_testing import level1, passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits
from cula_testing.process import run_python

RUN = (
    "import torch, cula; x = torch.ones(1, 3, 1, 8, device='{device}');"
    "o, _ = cula.cula_simple_gla(x, x, x, scale=1.0); print(o[0, :, 0, 0].tolist())"
)
ANSWER = "[8.0, 16.0, 24.0]\n"


def test_the_oracle_is_for_the_cpu():
    with pytest.raises(ValueError, match="reference: runs on CPU tensors, these are on CUDA"):
        level1.prefill(make(Case("kda", (5,))), backend="reference")


def test_a_cpu_target_is_for_the_cpu():
    with pytest.raises(ValueError, match="runs on CPU tensors, these are on CUDA"):
        level1.prefill(make(Case("kda", (5,))), backend="cpu")


def test_the_cpu_still_serves_the_cpu():
    with torch.device("cpu"):
        inputs = make(Case("kda", (70,)))
        passes.assert_rule(lambda inputs, backend: passes.prefill(inputs, backend=backend), inputs)


@pytest.mark.parametrize("argument", ["k", "beta", "cu_seqlens", "initial_state"])
def test_tensors_on_the_host_are_refused(argument):
    inputs = make(Case("kda", (70, 9), packed=True))
    mixed = inputs.but(**{argument: getattr(inputs, argument).cpu()})
    with pytest.raises(ValueError, match=rf"{argument} must be on q's device, cuda:0, got cpu"):
        level1.prefill(mixed)


def test_explain_knows_this_gpu():
    explanation = cula.explain(device="cuda")
    assert explanation.chosen is not None
    assert not explanation.chosen.startswith(("cpu", "reference"))


def test_visible_devices():
    last = torch.cuda.device_count() - 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",")[last] if visible else str(last)
    assert run_python("-c", RUN.format(device="cuda"), CUDA_VISIBLE_DEVICES=chosen) == ANSWER


def test_no_visible_device():
    """The library loads and serves the CPU where no GPU is to be seen."""
    assert run_python("-c", RUN.format(device="cpu"), CUDA_VISIBLE_DEVICES="") == ANSWER


def test_a_second_device(algorithm):
    """The tensors decide, not the current device, which stays what it was."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = Case(algorithm, (130, 0, 65), packed=True)
    first, second = make(case), make(case, device="cuda:1")
    for call in (passes.prefill, passes.decode):
        one, two = call(first), call(second)
        assert torch.cuda.current_device() == 0
        assert two.o.device == torch.device("cuda:1")
        assert_same_bits("o", one.o.cpu(), two.o.cpu())
        assert_same_bits("final_state", one.final_state.cpu(), two.final_state.cpu())
