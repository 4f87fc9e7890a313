# SPDX-License-Identifier: Apache-2.0
"""A case's target is what its call asks for (cula_testing/passes.py), wherever its tensors lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import cula
from cula._explain import Row
from cula_testing import device as device_of_the_run
from cula_testing.cases import Case, make
from cula_testing.passes import backend_of

pytestmark = pytest.mark.cpu_only("it asks no kernel")

ROWS = {
    ("cpu", "prefill"): ("cpu:portable",),
    ("cuda", "prefill"): ("sm90", "sm90:fused", "sm80", "sm80:step"),
    ("cuda", "decode"): ("sm80", "sm80:step"),
}


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    def explain(_algorithm, pass_name, *, device, **_):
        return [Row(name, "yes", "", None) for name in ROWS[device, pass_name]]

    monkeypatch.setattr(cula, "explain", explain)
    device_of_the_run._rows.cache_clear()
    yield
    device_of_the_run._rows.cache_clear()


@pytest.mark.parametrize("name", ["sm80", "sm80:step", "sm90", "sm90:fused"])
def test_tensors_of_a_gpu_beside_a_default_device_that_is_a_cpu(name):
    """As compute-sanitizer's cases have it, which are drawn on the CPU."""
    assert torch.get_default_device().type == "cpu"
    inputs = SimpleNamespace(case=Case("kda", backend=name), q=SimpleNamespace(device=torch.device("cuda")))
    assert backend_of(inputs, "prefill") == name


def test_a_pass_that_the_target_has_no_kernel_for():
    inputs = SimpleNamespace(case=Case("kda", backend="sm90"), q=SimpleNamespace(device=torch.device("cuda")))
    assert backend_of(inputs, "decode") == ""


def test_tensors_of_a_cpu():
    assert backend_of(make(Case("kda", (3,), backend="cpu")), "prefill") == "cpu"
