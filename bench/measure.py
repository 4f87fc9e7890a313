# SPDX-License-Identifier: Apache-2.0
"""The time of a call: implementations in turn, on inputs that rotate through more memory than the caches hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

Call = Callable[[], object]

SECONDS = 0.8  # of samples per implementation and case
MIN_CALLS, MAX_CALLS = 5, 2000


def interleaved(calls: dict[str, list[Call]]) -> dict[str, float]:
    """The median seconds of each implementation's calls, one call per set of inputs.

    The implementations take turns, a round through all sets each, so that a slow minute of the machine falls on all.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for sets in calls.values():
        sets[0]()  # first call: allocations, thread pools

    def unfinished(name: str) -> bool:
        taken = samples[name]
        return len(taken) < MIN_CALLS or (sum(taken) < SECONDS and len(taken) < MAX_CALLS)

    while waiting := [name for name in calls if unfinished(name)]:
        for name in waiting:
            for call in calls[name]:
                start = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - start)
                if not unfinished(name):
                    break
    return {name: median(taken) for name, taken in samples.items()}
