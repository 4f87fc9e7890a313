# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from cases import ALGORITHMS, Case, make

# The same examples on every machine; CULA_TEST_PROFILE=thorough looks for new ones.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", derandomize=True, max_examples=8, database=None, **COMMON)
settings.register_profile("thorough", max_examples=200, **COMMON)
settings.load_profile(os.environ.get("CULA_TEST_PROFILE", "ci"))

CPU_TARGETS = ("cpu:amx", "cpu:avx512bf16", "cpu:avx512", "cpu:avx2", "cpu:portable")


def pytest_configure() -> None:
    # pytest-xdist gives every worker a share of the cores; torch would take them all in each.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(params=ALGORITHMS, scope="session")
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CPU_TARGETS, scope="session")
def target(request: pytest.FixtureRequest) -> str:
    """A CPU target by name; skipped with the registry's own sentence where this machine lacks it."""
    import passes

    try:
        passes.prefill(make(Case(lengths=(1,), key_dim=16, value_dim=16)), backend=request.param)
    except ValueError as declined:
        pytest.skip(str(declined))
    return request.param


@pytest.fixture
def sparse():
    """Makes zeros of any size that cost only the pages that are touched."""
    owners = []

    def make_one(dtype: torch.dtype, count: int) -> torch.Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        owners.append(mmap.mmap(-1, count * dtype.itemsize, flags=flags))
        return torch.frombuffer(owners[-1], dtype=dtype)

    return make_one
