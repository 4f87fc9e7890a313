# SPDX-License-Identifier: Apache-2.0
"""What is measured of a call, the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Medians over many calls, in milliseconds."""

    call_ms: float  # until the result is there: what the caller sees
    gpu_ms: float | None = None  # device time of all kernels of the call
    host_ms: float | None = None  # until the call returns, in a loop that does not wait for the device
    gpu_timing: str | None = (
        None  # "events" around the call, or the sum of its "kernels" where it waits for the device
    )
