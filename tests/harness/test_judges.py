# SPDX-License-Identifier: Apache-2.0
"""References are asked once for each problem where something else is judged, and always elsewhere."""

from __future__ import annotations

import pytest

from cula_testing import gradients, judges, operators, passes
from cula_testing.cases import Case, make, strided
from cula_testing.compare import assert_same_bits

pytestmark = pytest.mark.cpu_only("says nothing of a device")


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The passes that were called."""
    names, call = [], operators.call
    monkeypatch.setattr(judges, "_answers", type(judges._answers)())

    def counted(pass_name: str, **named) -> object:
        names.append(pass_name)
        return call(pass_name, **named)

    monkeypatch.setattr(operators, "call", counted)
    return names


def test_a_problem_is_asked_once(asked):
    inputs = make(Case("kda", (20,), key_dim=16, value_dim=16))
    first = passes.prefill(inputs, backend="reference")
    with judges.judging():
        kept = passes.prefill(inputs, backend="reference")
        assert len(asked) == 2
        kept.o.zero_()
        again = passes.prefill(make(inputs.case), backend="reference")
        assert len(asked) == 2
        for name, x in again.items():
            assert_same_bits(name, x, getattr(first, name))
    passes.prefill(inputs, backend="reference")
    assert len(asked) == 3


def test_another_problem_is_asked_again(asked):
    inputs = make(Case("kda", (20,), key_dim=16, value_dim=16))
    others = [
        inputs.but(q=strided(inputs.q)),
        inputs.but(q=inputs.q + 1),
        inputs.but(initial_state=inputs.initial_state + 1),
        inputs.but(case=inputs.case.but(scale=0.5)),
    ]
    with judges.judging():
        for each in [inputs, *others] * 2:
            passes.prefill(each, backend="reference")
        passes.prefill(inputs, backend="reference:naive")
        passes.decode(make(Case("kda", (1,), key_dim=16, value_dim=16)), backend="reference")
    assert asked == ["prefill"] * 6 + ["decode"]


def test_little_is_kept(asked, monkeypatch):
    cases = [Case("kda", (tokens,), key_dim=16, value_dim=16) for tokens in (20, 30)]
    d_o = [gradients.upstream(make(case))[0] for case in cases]
    monkeypatch.setattr(judges, "KEPT_BYTES", 0)
    with judges.judging():
        for case, given in [*zip(cases, d_o, strict=True)] * 2:
            gradients.backward(make(case), given, None, backend="reference")
    assert asked == ["backward"] * 4
    assert not judges._answers
