# SPDX-License-Identifier: Apache-2.0
"""The suites: which cases are measured with which implementations. One result file each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from bench import cpu, gpu
from bench.impls import COPY_STATE, OURS, Impl, cpu_impls
from cases import CPU_HEADLINES, HEADLINES, Case

# Tokens times heads. What is larger is for several GPUs.
ONE_GPU = 1 << 21

GPU_SOURCES = ("src/cuda", "src/core", "include", "bindings")


@dataclass(frozen=True)
class Suite:
    name: str
    pass_name: str
    ops: tuple[str, ...]
    cases: dict[tuple[str, str], dict[str, Case]]  # (op, pass): name: case
    impls: Callable[[], list[Impl]]
    device: ModuleType  # bench.cpu or bench.gpu
    sources: tuple[str, ...]  # the kernels' folders, hashed into the result

    def rows(self) -> Iterator[tuple[str, str, Case]]:
        for op in self.ops:
            for name, case in self.cases[op, self.pass_name].items():
                if self.device is cpu or sum(case.lengths) * case.value_heads <= ONE_GPU:
                    yield op, name, case


@functools.cache
def gpu_impls() -> list[Impl]:
    """What dispatch picks, every library that can be imported, and the floor of the passes that move states."""
    from bench.peers import peers  # imports them

    return [OURS, *peers(), COPY_STATE]


def _cpu(name: str, pass_name: str, ops: tuple[str, ...]) -> Suite:
    return Suite(name, pass_name, ops, CPU_HEADLINES, cpu_impls, cpu, ("src/cpu",))


def _gpu(name: str, pass_name: str, ops: tuple[str, ...]) -> Suite:
    return Suite(name, pass_name, ops, HEADLINES, gpu_impls, gpu, GPU_SOURCES)


SUITES = {
    suite.name: suite
    for suite in (
        _cpu("cpu_prefill", "prefill", ("kda", "gdn", "gla", "lightning")),
        _cpu("cpu_decode", "decode", ("kda", "gdn", "lightning")),
        _cpu("cpu_verify", "verify", ("kda", "gdn")),
        _gpu("decode", "decode", ("kda", "gdn")),
        _gpu("verify", "verify", ("kda", "gdn")),
        _gpu("kda_prefill", "prefill", ("kda",)),
        _gpu("gdn_prefill", "prefill", ("gdn",)),
        _gpu("lightning_prefill", "prefill", ("lightning",)),
        _gpu("gla_prefill", "prefill", ("gla",)),
    )
}

GROUPS = {
    "cpu": tuple(name for name, suite in SUITES.items() if suite.device is cpu),
    "gpu": tuple(name for name, suite in SUITES.items() if suite.device is gpu),
}
