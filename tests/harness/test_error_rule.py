# SPDX-License-Identifier: Apache-2.0
"""The rule that judges everything else can itself say no."""

from __future__ import annotations

import pytest
import torch

from cula_testing.compare import assert_accurate, assert_exact, assert_same_bits

pytestmark = pytest.mark.cpu_only("the rule is the same arithmetic anywhere")

ORACLE = torch.randn(50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
BF16 = torch.bfloat16


def wrong_by(relative: float) -> torch.Tensor:
    return (ORACLE * (1 + relative)).float()


def test_twice_the_naive_error_is_allowed_and_no_more():
    assert_accurate("x", wrong_by(0.02), ORACLE, wrong_by(0.01), BF16)
    with pytest.raises(AssertionError, match=r"rms error 3\.000e-02 is above the budget 2\.39"):
        assert_accurate("x", wrong_by(0.03), ORACLE, wrong_by(0.01), BF16)


def test_one_wrong_element_counts():
    x = ORACLE.float()
    x[3, 4] += 0.5
    with pytest.raises(AssertionError, match="max error"):
        assert_accurate("x", x, ORACLE, wrong_by(0.01), BF16)


def test_not_a_number_is_wrong_even_where_the_naive_recurrence_has_one():
    x = ORACLE.float()
    x[3, 4] = float("nan")
    with pytest.raises(AssertionError, match="1 of 2500 values are not finite"):
        assert_accurate("x", x, ORACLE, x, BF16)


def test_float32_inputs_have_a_float32_budget():
    assert_accurate("x", wrong_by(4e-7), ORACLE, ORACLE.float(), torch.float32)
    with pytest.raises(AssertionError, match="budget"):
        assert_accurate("x", wrong_by(2e-6), ORACLE, ORACLE.float(), torch.float32)


def test_a_small_map_beside_the_identity():
    small = ORACLE * 1e-12
    x = small + 1e-8
    with pytest.raises(AssertionError, match="budget"):
        assert_accurate("m", x.float(), small, small.float(), BF16)
    assert_accurate("m", x.float(), small, small.float(), BF16, beside=torch.eye(50))


def test_exact_and_bits():
    assert_exact("x", ORACLE, ORACLE * (1 + 1e-14))
    with pytest.raises(AssertionError):
        assert_exact("x", ORACLE, ORACLE * (1 + 1e-10))
    nan, zero = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])
    assert_same_bits("x", nan, nan.clone())
    with pytest.raises(AssertionError, match="1 of 2 values differ"):
        assert_same_bits("x", nan, zero)
