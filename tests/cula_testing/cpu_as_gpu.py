# SPDX-License-Identifier: Apache-2.0
"""The benchmark's clock of the CPU, as if it were a GPU's: quick, and with the times that a GPU has, too."""

from __future__ import annotations

import dataclasses

import pytest

from cula.bench import cpu


def install(
    monkeypatch: pytest.MonkeyPatch, *, times_like_calls: tuple[str, ...] = ("gpu_ms",), **more
) -> None:
    """times_like_calls: the fields of a measurement that get the time of the call. more: what else of the
    module is replaced."""
    given = {
        "prepare": None,
        "copy_tbps": 0.02,
        "gemm_tflops": 0.5,
        "driver": "1",
        "last_level_cache_bytes": 1 << 16,  # hundreds of sets of small inputs would fill a real one
    }
    for name, value in given.items():
        monkeypatch.setattr(cpu, name, lambda value=value: value)
    for name, value in {"MIN_CALLS": 1, "QUICK_SECONDS": 0.001, **more}.items():
        monkeypatch.setattr(cpu, name, value)
    times = cpu.times

    def as_a_gpu(calls, _quick):
        return {
            name: dataclasses.replace(each, **dict.fromkeys(times_like_calls, each.call_ms))
            for name, each in times(calls, True).items()
        }

    monkeypatch.setattr(cpu, "times", as_a_gpu)
