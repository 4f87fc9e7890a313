# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from cula_testing.cases import ALGORITHMS, Case, make

# The same examples on every machine; CULA_TEST_PROFILE=thorough looks for new ones.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", derandomize=True, max_examples=8, database=None, **COMMON)
settings.register_profile("thorough", max_examples=200, **COMMON)
settings.load_profile(os.environ.get("CULA_TEST_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors of the calls lie"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only(reason): skipped with --device cuda")
    config.addinivalue_line("markers", "large: holds tens of gigabytes; tests/gpu/run.py runs one at a time")
    # pytest-xdist gives every worker a share of the cores; torch would take them all in each.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    if on_cuda(config):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch finds no GPU here")
        torch.set_default_device("cuda")


def on_cuda(config: pytest.Config) -> bool:
    return config.getoption("--device") == "cuda"


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"device: {torch.cuda.get_device_name()}" if on_cuda(config) else None


def but_for_the_target(item: pytest.Item) -> str:
    """An item's name, which the items of the same test for other targets share."""
    given = getattr(item, "callspec", None)
    return item.nodeid.replace(str(given.params.get("target", "")), "") if given else item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The targets of one problem in a row: they share the answers of the references.
    places: dict[str, int] = {}
    items.sort(key=lambda item: places.setdefault(but_for_the_target(item), len(places)))
    if not on_cuda(config):
        return
    from cula_testing import device

    declined = device.declined_algorithms()
    for item in items:
        if mark := item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"CPU only: {mark.args[0]}"))
        given = getattr(item, "callspec", None)
        for name in device.algorithms_in(given.params.values() if given else ()) & declined.keys():
            item.add_marker(pytest.mark.skip(reason=f"no target takes {name}: {declined[name]}"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        from cula_testing import device

        metafunc.parametrize("target", device.targets(), indirect=True, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """A test of all algorithms on a target that has no kernel for some of them says nothing about those."""
    try:
        return (yield)
    except ValueError as declined:
        from cula_testing import device

        if not device.declines_the_algorithm(str(declined)):
            raise
        pytest.skip(str(declined))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A fault in a kernel ends the process, or every later test of it would fail too. (xdist starts
    another.)"""
    if not (report.failed and torch.cuda.is_initialized()):
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as fault:
        print(f"\n{report.nodeid}: {report.longreprtext}\n{fault}", file=sys.__stderr__, flush=True)
        os._exit(3)


@pytest.fixture(params=ALGORITHMS, scope="session")
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def why_not(target: str) -> str:
    """Why this machine cannot run a target of the device, in the registry's own sentence, or nothing."""
    from cula_testing import passes

    try:
        passes.prefill(make(Case(lengths=(1,), key_dim=16, value_dim=16)), backend=target)
    except ValueError as reason:
        return str(reason)
    return ""


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> str:
    """A target of the device by name; skipped where this machine lacks it."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def sparse():
    """Makes zeros of any size, which on the CPU cost only the pages that are touched."""
    owners = []

    def make_one(dtype: torch.dtype, count: int) -> torch.Tensor:
        if torch.get_default_device().type == "cuda":
            return torch.zeros(count, dtype=dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        owners.append(mmap.mmap(-1, count * dtype.itemsize, flags=flags))
        return torch.frombuffer(owners[-1], dtype=dtype)

    yield make_one
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
