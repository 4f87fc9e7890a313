# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cula_testing import device


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """New tensors lie on the GPU, whatever --device says."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none here")
    with torch.device("cuda"):
        yield


# A test that leaves more of it to PyTorch gives it back.
KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """What PyTorch keeps for later calls is missing in the processes of the tests beside this one."""
    yield
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(params=["sm90", "sm80"])
def backend(request: pytest.FixtureRequest) -> str:
    """The targets that work in chunks, one after the other."""
    if request.param not in device.able(torch.bfloat16):
        pytest.skip(f"{request.param} does not run here")
    return request.param
