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


@pytest.fixture(params=["sm90", "sm80"])
def backend(request: pytest.FixtureRequest) -> str:
    """The targets that work in chunks, one after the other."""
    if request.param not in device.able(torch.bfloat16):
        pytest.skip(f"{request.param} does not run here")
    return request.param
