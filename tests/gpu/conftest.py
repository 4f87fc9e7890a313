# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """New tensors lie on the GPU, whatever --device says."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none here")
    with torch.device("cuda"):
        yield
