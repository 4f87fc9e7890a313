# SPDX-License-Identifier: Apache-2.0
"""Which gated norms FLA is handed on GPUs, on a stand-in that refuses what FLA refuses and computes on a
CPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from cula import _norm_gpu, _plain
from cula_testing import packages
from cula_testing.process import run_python

pytestmark = pytest.mark.cpu_only("a stand-in in place of a library for GPUs")

x, gate = (torch.randn(2, 20, 24, dtype=torch.bfloat16) for _ in range(2))
weight, bias = torch.randn(24), torch.randn(24)
GIVEN = {
    "x": x, "gate": gate, "weight": weight, "bias": None, "eps": 1e-5, "sigmoid": False,
    "norm_before_gate": True, "group_size": 0, "zero_centered": False,
}  # fmt: skip
WIDE = torch.randn(2, 16384 + 8)


class Fla:
    """`fla.modules.fused_norm_gate` of 0.6.0: a row is one block of at most 64 KiB."""

    calls = 0

    def rms_norm_gated(
        self, x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
        residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
        eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        assert x.shape == g.shape
        assert x.numel()
        assert x.shape[-1] * x.element_size() <= 65536
        assert residual is None
        assert not prenorm
        assert not residual_in_fp32
        return _plain.norm(x, g, weight, bias, eps, activation == "sigmoid")


@pytest.fixture
def fla(monkeypatch):
    fla = Fla()
    installed = {"fla.modules.fused_norm_gate": fla}
    monkeypatch.setattr(
        _norm_gpu, "library_function", lambda module, name: getattr(installed.get(module), name, None)
    )
    return fla


TAKEN = {
    "the usual": {},
    "a sigmoid and a bias": {"sigmoid": True, "bias": bias},
    "no weight": {"weight": None},
    "a weight around zero": {"zero_centered": True},
    "zero-centered without weight": {"zero_centered": True, "weight": None},
    "one group": {"group_size": 24},
    "float32": {"x": x.float(), "gate": gate.float()},
    "the widest row": {"x": WIDE[:, :16384], "gate": WIDE[:, 8:], "weight": None},
}
LEFT = {
    "no gate": {"gate": None},
    "the gate first": {"norm_before_gate": False},
    "groups": {"group_size": 8},
    "a gate of another dtype": {"gate": gate.float()},
    "float64": {"x": x.double(), "gate": gate.double()},
    "no rows": {"x": x[:0], "gate": gate[:0]},
    "a row beyond a block": {"x": WIDE, "gate": WIDE, "weight": None},
}


@pytest.mark.parametrize("what", TAKEN)
def test_taken(what, fla):
    given = GIVEN | TAKEN[what]
    made = _norm_gpu.norm(**given)
    assert fla.calls == 1
    torch.testing.assert_close(made, _plain.norm(**given), rtol=0, atol=0)


@pytest.mark.parametrize("what", LEFT)
def test_left_to_pytorch(what, fla):
    assert _norm_gpu.norm(**GIVEN | LEFT[what]) is None
    assert not fla.calls


def test_without_fla(monkeypatch):
    monkeypatch.setattr(_norm_gpu, "library_function", lambda *_: None)
    assert _norm_gpu.norm(**GIVEN) is None


def test_signature():
    program = """
import inspect
from fla.modules.fused_norm_gate import rms_norm_gated

print(*inspect.signature(rms_norm_gated).parameters)
"""
    theirs = run_python("-W", "ignore", "-c", program, PYTHONPATH=packages.path_with_fla())
    assert theirs.split() == [*inspect.signature(Fla().rms_norm_gated).parameters]
