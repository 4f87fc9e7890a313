# SPDX-License-Identifier: Apache-2.0
"""The device that the tests run on, torch's default device, and what the registry has for it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import cula
from cula._explain import Row


def kind() -> str:
    return torch.get_default_device().type


# Has a call read the lengths, indices and plans that it got in a GPU's memory, for which it has to wait.
DEBUG_CHECKS = "CULA_DEBUG_CHECKS"


def values_are_read() -> bool:
    return kind() != "cuda" or os.environ.get(DEBUG_CHECKS) == "1"


@functools.cache
def _rows(
    device: str,
    pass_name: str,
    dtype: torch.dtype,
    beta_per_value: bool = False,
    key_dim: int = 128,
    algorithm: str = "kda",
    writes: int | None = None,
) -> tuple[Row, ...]:
    named = {"dtype": dtype, "beta_per_value": beta_per_value, "key_dim": key_dim, "device": device}
    usual = 2 if cula.algorithms()[algorithm].takes_several_writes else 1
    rows = cula.explain(algorithm, pass_name, writes=writes or usual, **named)
    return tuple(
        row for row in rows if not row.target.startswith("reference") and not row.reason.startswith("runs on")
    )


# Ways to run a chunked prefill, which take few calls and have tests of their own (tests/gpu).
STRATEGIES = ("fused", "joined", "whole", "halves", "segments")


def is_strategy(target: str) -> bool:
    return target.partition(":")[2] in STRATEGIES


def targets(pass_name: str = "prefill") -> list[str]:
    """Every target for this device, whether this machine can run it or not."""
    return [row.target for row in _rows(kind(), pass_name, torch.bfloat16) if not is_strategy(row.target)]


def able(
    dtype: torch.dtype,
    pass_name: str = "prefill",
    *,
    beta_per_value: bool = False,
    key_dim: int = 128,
    on: str = "",
    algorithm: str = "kda",
    writes: int | None = None,
) -> list[str]:
    """The targets that take such a call on this machine; on: a device other than the default one; writes: of
    a token, by default two where the algorithm has several."""
    rows = _rows(on or kind(), pass_name, dtype, beta_per_value, key_dim, algorithm, writes)
    return [row.target for row in rows if row.verdict != "no" and not is_strategy(row.target)]


def declined_algorithms(on: str = "") -> dict[str, str]:
    """The algorithms whose prefill no target of the device takes, each with the sentence of the last target;
    on: a device other than the default one."""
    declined = {}
    for name in cula.algorithms():
        rows = [
            row for row in cula.explain(name, device=on or kind()) if not row.reason.startswith("runs on")
        ]
        if all(row.verdict == "no" for row in rows):
            declined[name] = rows[-1].reason
    return declined


# What chunked targets take of calls with low-rank keys. Beside it a refusal of a backward call by a family
# lists why its three walks decline the algorithm, which they do for many.
_LOW_RANK = re.compile(r"takes [a-zA-Z0-9 ]+ beside low-rank keys(, got \d+)?")
_THREE_WALKS = "takes rules that add values as they are, without a decay or with one per head"


def declines_the_algorithm(refusal: str) -> bool:
    """Whether the error of a call that named its backend says that no target of that name has a kernel for
    the algorithm, or, with low-rank keys, for such calls of it: every reason that it lists is one of those
    above."""
    head, *rows = refusal.split("\n")
    if not re.fullmatch(r'[a-z]+: backend "[a-z0-9_:]+" does not take this call:', head):
        return False
    decisive = 0
    for row in rows:
        target, _, reason = row.strip().partition(": ")
        if _LOW_RANK.fullmatch(reason):
            decisive += 1
        elif not (target.endswith(":three_walks") and reason == _THREE_WALKS):
            return False
    return decisive > 0


def algorithms_in(parameters: Iterable[object]) -> set[str]:
    """The algorithms that a test's parameters name: one, a case, a row of a table ("kda-collinear"), or a
    drop-in ("chunk_gdn2")."""
    names = (getattr(value, "algorithm", value) for value in parameters)
    words = (re.split("-|chunk_|recurrent_", name) for name in names if isinstance(name, str))
    return {word for name in words for word in name} & cula.algorithms().keys()


def serves(target: str, pass_name: str, on: str = "") -> bool:
    """Whether the target or strategy has a kernel for the pass on this device, or on `on`: on a GPU, one may
    be made for a single pass."""
    names = (row.target for row in _rows(on or kind(), pass_name, torch.bfloat16))
    return any(name == target or name.startswith(f"{target}:") for name in names)


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of the library's kernels that a call launches on a GPU, in their order. It is made once
    before."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    return [name for name in names if "cula::" in name]


def family() -> str:
    """A name that stands for several targets of this device."""
    return targets()[-1].partition(":")[0]
