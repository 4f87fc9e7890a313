# SPDX-License-Identifier: Apache-2.0
"""Streams: a call runs on the caller's current one, in its order, and waits for nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cula_testing import device, level1
from cula_testing.cases import ALGORITHMS, Case, make
from cula_testing.kinds import KINDS, assert_same_results, ready

LONG = 1 << 29  # clock cycles: a quarter of a second or more


@contextmanager
def no_synchronization():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", KINDS)
def test_runs_on_the_current_stream(algorithm, name):
    """Its inputs arrive late on a side stream; on any other stream it would read what was there before."""
    call, late, wanted = ready(name, algorithm, 0), ready(name, algorithm, 1), ready(name, algorithm, 1)
    wanted()
    call()  # the kernels are loaded
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        call.overwrite(late)
        call()
    side.synchronize()
    assert_same_results("late inputs", wanted, call)


@pytest.mark.parametrize("name", KINDS)
def test_does_not_wait_for_the_device(algorithm, name):
    call, asleep = ready(name, algorithm), torch.cuda.Event()
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    asleep.record()
    with no_synchronization():
        call()
    assert not asleep.query(), "the call returned only after what was queued before it had run"


def seen_on_the_device(call) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("name", KINDS)
def test_copies_nothing_between_host_and_device(name):
    call = ready(name, "kda")
    call()
    device = seen_on_the_device(call)
    if not device:
        pytest.skip("the profiler sees no device activity on this machine")
    assert not [name for name in device if "HtoD" in name or "DtoH" in name], device


def test_a_call_that_writes_nothing_launches_no_kernel(algorithm):
    """As several ranks check their arguments. What PyTorch does to a gate's parameters before is another
    matter."""
    inputs = make(
        Case(algorithm, (0,), heads=2, value_heads=2, key_dim=64, value_dim=64, dtype=torch.bfloat16)
    )
    stored = seen_on_the_device(lambda: level1.prefill(inputs))
    if not stored:
        pytest.skip("the profiler sees no device activity on this machine")
    assert any("cula::" in name for name in stored), stored
    nothing = seen_on_the_device(lambda: level1.prefill(inputs, output_final_state=False))
    assert not any("cula::" in name for name in nothing), nothing


@pytest.mark.parametrize("name", KINDS)
def test_two_streams_at_once(algorithm, name):
    calls, streams = (
        [ready(name, algorithm, seed) for seed in range(4)],
        [torch.cuda.Stream() for _ in range(2)],
    )
    torch.cuda.synchronize()
    for i, call in enumerate(calls):
        with torch.cuda.stream(streams[i % 2]):
            call()
    torch.cuda.synchronize()
    for seed, call in enumerate(calls):
        alone = ready(name, algorithm, seed)
        alone()
        assert_same_results(f"call {seed}", alone, call)


def test_threads_with_streams_of_their_own():
    taken = [name for name in ALGORITHMS if name not in device.declined_algorithms()]
    calls = [ready(name, algorithm) for name in ("varlen", "decode") for algorithm in taken]
    wanted = [ready(name, algorithm) for name in ("varlen", "decode") for algorithm in taken]
    torch.cuda.synchronize()

    def run(call) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, calls))
    for alone, call in zip(wanted, calls, strict=True):
        alone()
        assert_same_results(alone.inputs.case.algorithm, alone, call)
