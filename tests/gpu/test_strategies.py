# SPDX-License-Identifier: Apache-2.0
"""Every way to run a chunked prefill (docs/design/planning.md), forced where it would not be chosen: each
obeys the error rule, and `explain` says which a call can be run by."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing import device, passes
from cula_testing.cases import Case, make

SHAPES = {
    "one": {"lengths": (64 * 70 - 3,)},
    "few segments": {"lengths": (64 * 24 + 1,)},
    "batch": {"lengths": (64 * 66, 64 * 66)},
    "packed": {"lengths": (64 * 40, 0, 5, 64 * 33 + 7), "packed": True, "tail": 9},
    "null rows": {"lengths": (64 * 26, 64 * 26), "pool": True},
    "narrow": {"lengths": (64 * 70,), "key_dim": 72, "value_dim": 24},
    "groups in float16": {"lengths": (64 * 40,), "heads": 2, "value_heads": 4, "dtype": torch.float16},
}
SMALL = {"heads": 1, "value_heads": 1, "key_dim": 128, "value_dim": 128}


def strategies_of(case: Case) -> list[str]:
    rows = cula.explain(
        case.algorithm, batch=case.batch, tokens=case.tokens, sequences=len(case.lengths), heads=case.heads,
        value_heads=case.value_heads, key_dim=case.key_dim, value_dim=case.value_dim, dtype=case.dtype,
        varlen=case.packed, gate=case.gate, device=device.kind(), writes=case.writes,
    )  # fmt: skip
    return [row.target for row in rows if device.is_strategy(row.target) and row.verdict != "no"]


def each_obeys_the_rule(case: Case, ways_of_hopper: set[str]) -> None:
    found = strategies_of(case)
    assert {"sm80:segments", "sm80:whole"} <= set(found)
    if "sm90" in device.able(torch.bfloat16, algorithm=case.algorithm):
        assert {f"sm90:{way}" for way in ways_of_hopper} <= set(found)
    inputs = make(case)
    for target in found:
        passes.assert_rule(lambda inputs, backend: passes.prefill(inputs, backend=backend), inputs, target)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_strategy_obeys_the_rule(algorithm, shape):
    halves = {"halves"} if (algorithm, shape) == ("gdn", "one") else set()
    each_obeys_the_rule(Case(algorithm, **{**SMALL, **SHAPES[shape]}), {"whole", "segments", *halves})


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_every_strategy_of_raw_gates_obeys_the_rule(gate):
    case = Case(
        "kda", (64 * 40,), gate=gate, gate_dtype=torch.bfloat16, qk_l2norm=True, beta_is_logit=True, **SMALL
    )  # fmt: skip
    each_obeys_the_rule(case, {"fused", "joined", "whole", "segments"})


def test_a_strategy_that_is_none_is_refused():
    inputs = make(Case("kda", (64,), key_dim=128, value_dim=128))
    with pytest.raises(ValueError, match='backend "sm80:segments" does not take this call:'):
        passes.prefill(inputs, backend="sm80:segments")


def test_the_cheapest_is_taken():
    rows = {row.target: row for row in cula.explain("gdn", tokens=8192, heads=16, device=device.kind())}
    for target in ("sm80", "sm90"):
        times = [
            row.microseconds
            for name, row in rows.items()
            if name.startswith(f"{target}:") and row.microseconds is not None
        ]
        if times:  # what cuts more has to promise 4 % less
            assert min(times) <= rows[target].microseconds <= min(times) / 0.96
