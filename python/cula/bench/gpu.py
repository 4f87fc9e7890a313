# SPDX-License-Identifier: Apache-2.0
"""Measuring on a GPU: its name, its ceilings, and the time of a call.

Device time is the time between two events around calls that were all launched while the device was kept
waiting, so no launch of the host's falls into it. The gaps between the kernels of a call do: the caller waits
for them too.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from .measure import Call, Times

DEVICE = "cuda"
CACHE_FACTOR = 3.0
ORACLE_TOKENS = 4096  # errors are taken of the same call on sequences cut to this length

COPY_BYTES = 2 << 30
GEMM_SIZE = 8192
CLOCK_CALLS = 600  # matrix products, about a second: longer than nvidia-smi takes to answer

MAX_CLOCK_HZ = 2.0e9  # no data-centre GPU runs faster, so a wait in cycles is at least as long as meant
MIN_WAIT, MAX_WAIT = 30e-6, 50e-3
SHORT_CALL = 100e-6  # calls shorter than this share a pair of events, whose own cost would show
MAX_SHARED = 32

SECONDS = 0.3  # of device time per implementation and case
QUICK_SECONDS = 0.05
MIN_SAMPLES, MAX_SAMPLES = 7, 60
HOST_LOOPS, HOST_CALLS, HOST_SECONDS = 15, 10, 0.2
WARM_UP_CALLS = 3


def prepare() -> None:
    torch.cuda.init()


def wait() -> None:
    """Until all calls are through."""
    torch.cuda.synchronize()


def name() -> str:
    return torch.cuda.get_device_name()


def _ask(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def driver() -> str | None:
    return _ask("driver_version") or None


def clock_mhz() -> list[int]:
    """The clock of the multiprocessors at work, if it can be had."""
    a = torch.randn(GEMM_SIZE, GEMM_SIZE, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(CLOCK_CALLS):
        torch.mm(a, a)
    answer = _ask("clocks.sm")
    torch.cuda.synchronize()
    return [int(answer)] if answer.isdigit() else []


def last_level_cache_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def copy_tbps() -> float:
    """TB/s of a large copy, bytes read and bytes written both counted."""
    source = torch.randint(255, (COPY_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / device_seconds(lambda: target.copy_(source)) / 1e12


def gemm_tflops() -> float:
    """TFLOP/s of a large bf16 matrix product of random numbers."""
    a, b, c = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    return 2 * GEMM_SIZE**3 / device_seconds(lambda: torch.mm(a, b, out=c)) / 1e12


def peak_bytes(bind: Callable[[], Call]) -> int:
    """What a call holds at most, its results too, beside what was there before it was bound. It has run
    before: tuning takes memory of its own."""
    gc.collect()
    wait()
    before = torch.cuda.memory_allocated()
    call = bind()
    torch.cuda.reset_peak_memory_stats()
    made = call()
    wait()
    del made
    return torch.cuda.max_memory_allocated() - before


def device_seconds(call: Call, repeats: int = 15) -> float:
    timer = _Timer([call])
    return median(timer.device_seconds() for _ in range(repeats))


class _Timer:
    """Times one implementation, set after set of its inputs."""

    def __init__(self, sets: list[Call]) -> None:
        self.sets = itertools.cycle(sets)
        for call in itertools.islice(self.sets, WARM_UP_CALLS):
            call()
        self.host = self._host_seconds()
        self.wait = MIN_WAIT
        self.shared = 1
        self.waits_for_device = False
        first = self.device_seconds()
        if not self.waits_for_device:
            self.shared = max(1, min(MAX_SHARED, round(SHORT_CALL / first)))
        self.device: list[float] = []
        self.latency: list[float] = []

    def _next(self, count: int) -> Iterator[Call]:
        return itertools.islice(self.sets, count)

    def _host_seconds(self) -> float:
        samples: list[float] = []
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while not samples or (len(samples) < HOST_LOOPS and time.perf_counter() - begin < HOST_SECONDS):
            start = time.perf_counter()
            for call in self._next(HOST_CALLS):
                call()
            samples.append((time.perf_counter() - start) / HOST_CALLS)
            torch.cuda.synchronize()
        return median(samples)

    def device_seconds(self) -> float:
        """Of one call. A call that itself waits for the device is beyond this method: the sum of its kernels
        then."""
        wait = max(self.wait, 1.5 * self.host * self.shared)
        while wait <= MAX_WAIT and not self.waits_for_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(wait * MAX_CLOCK_HZ))
            begin.record()
            for call in self._next(self.shared):
                call()
            in_time = not begin.query()
            end.record()
            end.synchronize()
            if in_time:
                return begin.elapsed_time(end) / 1e3 / self.shared
            wait *= 2
            self.wait = wait
        self.waits_for_device, self.shared = True, 1
        return self._kernel_seconds()

    def _kernel_seconds(self) -> float:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            for call in self._next(1):
                call()
            torch.cuda.synchronize()
        return (
            sum(e.time_range.elapsed_us() for e in trace.events() if e.device_type == DeviceType.CUDA) / 1e6
        )

    def sample(self) -> None:
        self.device.append(self.device_seconds())
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in self._next(1):
            call()
        torch.cuda.synchronize()
        self.latency.append(time.perf_counter() - start)

    def unfinished(self, seconds: float, until: float) -> bool:
        count = len(self.device)
        if count and time.perf_counter() > until:
            return False
        return count < MIN_SAMPLES or (count < MAX_SAMPLES and sum(self.device) * self.shared < seconds)

    def times(self) -> Times:
        return Times(
            call_ms=1e3 * median(self.latency),
            gpu_ms=1e3 * median(self.device),
            host_ms=1e3 * self.host,
            gpu_timing="kernels" if self.waits_for_device else "events",
        )


def times(calls: dict[str, list[Call]], quick: bool = False, until: float = float("inf")) -> dict[str, Times]:
    """Of each implementation's calls, one call per set of inputs. The implementations take turns. From
    `until` (of time.perf_counter) on, one sample of each is enough."""
    timers = {name: _Timer(sets) for name, sets in calls.items()}
    seconds = QUICK_SECONDS if quick else SECONDS
    while waiting := [timer for timer in timers.values() if timer.unfinished(seconds, until)]:
        for timer in waiting:
            timer.sample()
    return {name: timer.times() for name, timer in timers.items()}
