# SPDX-License-Identifier: Apache-2.0
"""What is measured of a call and of a machine, the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Medians over many calls, in milliseconds."""

    call_ms: float  # until the result is there: what the caller sees
    gpu_ms: float | None = None  # device time of all kernels of the call
    host_ms: float | None = None  # until the call returns, in a loop that does not wait for the device
    gpu_timing: str | None = (
        None  # "events" around the call, or the sum of its "kernels" where it waits for the device
    )

    @property
    def milliseconds(self) -> float:
        """Device time where it is known, else what the caller sees."""
        return self.call_ms if self.gpu_ms is None else self.gpu_ms


def significant(value: float, digits: int = 6) -> float:
    """`value` with that many significant digits. Rounded to decimals, the rate of a slow machine, which other
    figures are divided by, could become 0."""
    return float(f"{value:.{digits}g}")


def describe(device: ModuleType) -> dict[str, Any]:
    """What results are measured on; `device` is cula.bench.cpu or cula.bench.gpu."""
    return {
        "device": device.name(),
        "driver": device.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_tbps": significant(device.copy_tbps()),
        "gemm_tflops": significant(device.gemm_tflops()),
    }
