# SPDX-License-Identifier: Apache-2.0
"""segment: S -> M S + B of each sequence, and the composition that parallelism over the sequence rests on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import passes
from cases import Case, Inputs, make
from compare import assert_same_bits
from strategies import cases


def apply(m: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """M S, on states [.., V, K]."""
    if m.ndim == 3:
        return m[:, :, None, :] * state
    return torch.einsum("nhij,nhvj->nhvi", m, state)


def multiply(second: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return second * first if second.ndim == 3 else second @ first


def stateless(inputs: Inputs) -> Inputs:
    return inputs.but(initial_state=None, initial_state_indices=None)


@given(data=st.data())
def test_the_map_takes_the_initial_state_to_the_final_state(algorithm, data):
    case = data.draw(cases(algorithm, state=True, pool=False, beta_per_value=False, state_dtype=torch.float32))
    inputs = make(case)

    def either(inputs: Inputs, backend: str) -> passes.Result:
        if backend == "reference":
            return passes.Result(b=passes.prefill(inputs, backend=backend).final_state)
        found = passes.segment(stateless(inputs), backend=backend)
        return passes.Result(b=apply(found.m, inputs.initial_state.float()) + found.b)

    passes.assert_rule(either, inputs)


@given(data=st.data())
def test_maps_compose(algorithm, data):
    case = data.draw(cases(algorithm, packed=False, state=False, beta_per_value=False))
    cut = data.draw(st.integers(0, case.tokens))

    def composed(inputs: Inputs, backend: str) -> passes.Result:
        first = passes.segment(inputs.tokens(0, cut), backend=backend)
        second = passes.segment(inputs.tokens(cut, case.tokens), backend=backend)
        return passes.Result(m=multiply(second.m, first.m), b=apply(second.m, first.b) + second.b)

    def either(inputs: Inputs, backend: str) -> passes.Result:
        return passes.segment(inputs, backend=backend) if backend == "reference" else composed(inputs, backend)

    passes.assert_rule(either, make(case))


@given(data=st.data())
def test_poison_and_strides_change_nothing(algorithm, data):
    case = data.draw(cases(algorithm, state=False, beta_per_value=False))
    one, two = passes.segment(make(case.but(fused=False))), passes.segment(make(case.but(fused=True)))
    again = passes.segment(make(case.but(fused=False)))
    for name in ("m", "b"):
        assert_same_bits("strided", getattr(one, name), getattr(two, name))
        assert_same_bits("again", getattr(one, name), getattr(again, name))


def test_a_zero_length_sequence_is_the_identity(algorithm):
    inputs = stateless(make(Case(algorithm, (0, 5), packed=True)))
    found = passes.segment(inputs)
    eye = torch.eye(64) if found.m.ndim == 4 else torch.ones(64)
    assert torch.equal(found.m[0], eye.expand_as(found.m[0]))
    assert not found.b[0].any()


def test_a_write_strength_per_value_has_no_such_map():
    inputs = stateless(make(Case("kda", (5,), beta_per_value=True)))
    with pytest.raises(ValueError, match="write strength per value channel"):
        passes.segment(inputs)
