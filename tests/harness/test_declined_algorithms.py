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


def refusal(backend: str, *rows: tuple[str, str]) -> str:
    lines = [f'prefill: backend "{backend}" does not take this call:', *(": ".join(row) for row in rows)]
    return "\n  ".join(lines)


LOW_RANK = "takes K up to 128 beside low-rank keys, got 200"
THREE_WALKS = "takes rules that add values as they are, without a decay or with one per head"
NO_FLOAT32 = "multiplies bfloat16 and float16; q is float32"


@pytest.mark.parametrize(
    ("message", "skipped"),
    [
        (refusal("sm90", ("sm90", LOW_RANK), ("sm90:fused", LOW_RANK)), True),
        (refusal("sm80:whole", ("sm80:whole", LOW_RANK)), True),
        (refusal("sm90", ("sm90:three_walks", THREE_WALKS), ("sm90", LOW_RANK)), True),
        (refusal("sm90:three_walks", ("sm90:three_walks", THREE_WALKS)), False),
        (refusal("sm90", ("sm90", THREE_WALKS), ("sm90:whole", LOW_RANK)), False),
        # The token-by-token kernels have to take such a call.
        (refusal("sm80", ("sm80", LOW_RANK), ("sm80:step", "has no kernel for rwkv7")), False),
        (refusal("sm80", ("sm80", LOW_RANK), ("sm80:step", "takes K up to 256, got 257")), False),
        (refusal("sm90", ("sm90", LOW_RANK), ("sm90:whole", NO_FLOAT32)), False),
        (refusal("sm90", ("sm90", f"{LOW_RANK}, and V is 300")), False),
        (f"prefill: no backend takes this call:\n  sm90: {LOW_RANK}", False),
        ('decode: backend "sm90" does not take this call: it has no decode kernel', False),
        ("cula_rwkv7: a_key and b_key are low-rank keys", False),
    ],
)
def test_refusals_that_skip_a_test(message, skipped):
    assert device.declines_the_algorithm(message) == skipped


@pytest.mark.parametrize("pass_name", ["prefill", "segment", "backward"])
def test_the_reasons_are_those_of_the_library(pass_name):
    """Where the kernels of GPUs are built: what the registry says of their targets."""
    rows = [
        (row.target, row.reason)
        for row in cula.explain("rwkv7", pass_name, key_dim=200, device="sm_90")
        if row.target.partition(":")[0] == "sm80" and row.target != "sm80:step"
    ]
    if not rows:
        pytest.skip("the library is built without the kernels of GPUs")
    assert device.declines_the_algorithm(refusal("sm80", *rows))


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
