# SPDX-License-Identifier: Apache-2.0
"""Memory: what a call takes, what it takes nothing from, and what lay there before."""

from __future__ import annotations

import gc

import pytest
import torch

from cula_testing import level1
from cula_testing.arena import known_memory, peak_bytes
from cula_testing.cases import Case, make
from cula_testing.kinds import KINDS, assert_same_results, ready

NAMES = pytest.mark.parametrize("name", KINDS)


def allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@NAMES
def test_allocates_a_workspace_and_nothing_else(algorithm, name):
    call = ready(name, algorithm)
    call()
    gc.collect()  # what earlier tests left in cycles would go back in between
    held, reserved, count = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), allocations()
    call()
    assert allocations() - count <= 1
    assert torch.cuda.memory_allocated() == held, "the workspace goes back"
    assert torch.cuda.memory_reserved() == reserved


@NAMES
def test_slices_of_a_projection_are_not_copied(algorithm, name):
    dense, sliced = ready(name, algorithm), ready(name, algorithm, fused=True)
    assert not sliced.inputs.q.is_contiguous()
    assert peak_bytes(sliced) == peak_bytes(dense)


def test_python_copies_no_slice_either(algorithm):
    case = Case(algorithm, (130, 0, 65), packed=True, key_dim=128, value_dim=128)
    dense, sliced = make(case), make(case.but(fused=True))
    assert peak_bytes(lambda: level1.prefill(sliced)) == peak_bytes(lambda: level1.prefill(dense))


@NAMES
def test_what_the_workspace_held_changes_nothing(algorithm, name):
    """NaN, zeros and rubbish in all that the allocator hands out; outputs hold NaN as ever."""
    wanted = ready(name, algorithm)
    wanted()
    for byte in (0, 0x55, 0x7F, 0xFF):
        call = ready(name, algorithm)
        with known_memory(byte):
            call()
        assert_same_results(f"bytes {byte:#x}", wanted, call)
