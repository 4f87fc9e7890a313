# SPDX-License-Identifier: Apache-2.0
"""The ranks that tests of this folder call, by how many they are."""

from __future__ import annotations

import pytest
import torch

from cula_testing.ranks import Ranks, need_gpus


@pytest.fixture(scope="session")
def kind(request) -> str:
    """Where the ranks compute."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def _here_on_the_cpu():
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)


@pytest.fixture(scope="session")
def pools(tmp_path_factory, kind):
    started: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        need_gpus(kind, size)
        if size not in started or started[size].broken:
            if size in started:
                started[size].close()
            started[size] = Ranks(size, tmp_path_factory.mktemp("ranks"), kind)
        return started[size]

    yield pool
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def precisions(kind) -> tuple[bool, ...]:
    """Whether a case is computed exactly, each way that the device can: the reference takes CPU tensors
    only."""
    return (False, True) if kind == "cpu" else (False,)


@pytest.fixture(scope="session")
def exact(precisions) -> bool:
    """Where one way is enough."""
    return precisions[-1]
