# SPDX-License-Identifier: Apache-2.0
"""Which tests a device without kernels for an algorithm skips (tests/conftest.py)."""

from __future__ import annotations

import pytest

import cula
from cula._explain import Row
from cula_testing import device
from cula_testing.cases import Case

pytestmark = pytest.mark.cpu_only("it asks no kernel")


def test_a_cpu_takes_every_algorithm():
    assert device.declined_algorithms("cpu") == {}


def test_an_algorithm_that_no_target_takes(monkeypatch):
    """A reference, which runs on CPU tensors, is no target of a GPU."""

    def explain(name, **_):
        verdict, reason = ("no", f"has no kernel for {name}") if name == "gdn2" else ("yes", "")
        return [
            Row("sm80", verdict, reason, None),
            Row("sm80:step", "no", f"has no kernel for {name}", None),
            Row("reference", "no", "runs on CPU tensors, these are on CUDA", None),
        ]

    monkeypatch.setattr(cula, "explain", explain)
    assert device.declined_algorithms("cuda") == {"gdn2": "has no kernel for gdn2"}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ((), set()),
        (("gdn2", 64), {"gdn2"}),
        (("sm80", "delta-collinear"), {"delta"}),
        ((Case("kda"), "gdn2-T16"), {"kda", "gdn2"}),
        (("chunk_gdn2", "cula.gla.fused_recurrent_gla"), {"gdn2", "gla"}),
    ],
)
def test_what_a_test_is_about(parameters, found):
    assert device.algorithms_in(parameters) == found
