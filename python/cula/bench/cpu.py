# SPDX-License-Identifier: Apache-2.0
"""Measuring on a CPU: its name, its ceilings, and the time of a call."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from .measure import Call, Times

DEVICE = "cpu"
CACHE_FACTOR = 1.25  # rotating inputs are this much larger than the last cache
ORACLE_TOKENS = None  # errors are taken of the measured call itself

UNKNOWN_CACHE_BYTES = 64 << 20
COPY_BYTES = 1 << 30
GEMM_SIZES = (256, 1024, 4096)
GEMM_SECONDS = 1.0
QUIET_LOAD = 0.5

SECONDS = 0.8  # of samples per implementation and case
QUICK_SECONDS = 0.1
MIN_CALLS, MAX_CALLS = 5, 2000


def prepare() -> None:
    # A decaying state passes through the denormal range, which plain PyTorch then crawls through.
    torch.set_flush_denormal(True)
    if (busy := os.getloadavg()[0]) > QUIET_LOAD:
        print(
            f"others are using this machine (load {busy:.1f}): times will be too long, "
            "short calls' most of all"
        )


def wait() -> None:
    """Until all calls are through."""


def name() -> str:
    """The CPU's model and its cores."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{model[1] if model else os.uname().machine}, {torch.get_num_threads()} threads"


def driver() -> None:
    return None


def clock_mhz() -> list[int]:
    """Not known."""
    return []


def last_level_cache_bytes() -> int:
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    known = [int(text[:-1]) * units[text[-1]] for text in (path.read_text().strip() for path in sizes)]
    return max(known, default=UNKNOWN_CACHE_BYTES)


def peak_bytes(_bind: Callable[[], Call]) -> None:
    """Not known."""


def _seconds(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return median(samples)


def copy_tbps() -> float:
    """TB/s of a large copy, bytes read and bytes written both counted."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source)) / 1e12


def gemm_tflops() -> float:
    """TFLOP/s of a bf16 matrix product: of the largest of `GEMM_SIZES` that should take at most
    `GEMM_SECONDS`, by the rate of the size before it."""

    def rate(size: int) -> float:
        a, b = (torch.randn(size, size).bfloat16() for _ in range(2))
        return 2 * size**3 / _seconds(lambda: a @ b) / 1e12

    first, *larger = GEMM_SIZES
    found = rate(first)
    for size in larger:
        if 2 * size**3 / 1e12 > GEMM_SECONDS * found:
            break
        found = rate(size)
    return found


def times(calls: dict[str, list[Call]], quick: bool = False, until: float = float("inf")) -> dict[str, Times]:
    """Of each implementation's calls, one call per set of inputs.

    The implementations take turns, a round through all sets each, so that a slow minute of the machine falls
    on all. From `until` (of time.perf_counter) on, one sample of each is enough.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for sets in calls.values():
        sets[0]()  # first call: allocations, thread pools
    seconds = QUICK_SECONDS if quick else SECONDS

    def unfinished(name: str) -> bool:
        taken = samples[name]
        if taken and time.perf_counter() > until:
            return False
        return len(taken) < MIN_CALLS or (sum(taken) < seconds and len(taken) < MAX_CALLS)

    while waiting := [name for name in calls if unfinished(name)]:
        for name in waiting:
            for call in calls[name]:
                start = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - start)
                if not unfinished(name):
                    break
    return {name: Times(call_ms=1e3 * median(taken)) for name, taken in samples.items()}
