# SPDX-License-Identifier: Apache-2.0
"""The suites: which cases are measured with which implementations. One result file each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from bench.impls import JOINED, KEEPS, PORTABLE, cpu_impls
from cula.bench import cpu, gpu
from cula.bench.impls import COPY_DRAFTS, COPY_STATE, OURS, READ_STATE, Impl
from cula_testing.cases import (
    CPU_HEADLINES,
    FEW_HEADS,
    FEW_HEADS_OF_THE_MEAN,
    HEADLINES,
    SECTIONS,
    TRAINING,
    TRAINING_PASSES,
    Case,
)

# Tokens times heads. Headlines that are larger are for several GPUs.
ONE_GPU = 1 << 21

# Small batches of a serving engine may find states in the cache. Larger ones than this do not fit into it.
WARM_ROWS = 32

GPU_SOURCES = ("src/cuda", "src/core", "include", "bindings")

# What FLA runs in the sections: algorithm, gate, packed, heads of q and k, heads of v. It compiles and tunes
# for each for a minute or more; for all that the sections have it would take longer than everything else in
# them.
FLA_KINDS = {
    *(("kda", "bounded", False, heads, heads) for heads in (8, 12, 32, 64, 96)),
    ("kda", "bounded", True, 32, 32),
    ("kda", "softplus", False, 32, 32),
    ("gdn", "softplus", False, 16, 64),
    ("gdn", "softplus", False, 2, 8),
    ("gla", "log_decay", False, 32, 32),
    ("lightning", "log_decay", False, 64, 64),
}


@dataclass(frozen=True)
class Entry:
    """One case of a suite."""

    op: str
    name: str
    case: Case
    panel: str | None = None  # of a section's plot
    warm: bool = False  # every call on the same inputs: states in the cache, as far as they fit


def _every_case(_impl: Impl, _case: Case) -> bool:
    return True


@dataclass(frozen=True)
class Suite:
    name: str
    group: str  # one of GROUPS, or "by name": in none of them
    pass_name: str
    entries: tuple[Entry, ...]
    impls: Callable[[], list[Impl]]
    device: ModuleType  # cula.bench.cpu or cula.bench.gpu
    sources: tuple[str, ...]  # the kernels' folders, hashed into the result
    takes: Callable[[Impl, Case], bool] = _every_case  # besides what an implementation says of itself
    brief: bool = False  # a curve of many cases: fewer samples of each
    means: tuple[frozenset[str], ...] = ()  # the cases that one mean each is taken over

    @property
    def trains(self) -> bool:
        return self.pass_name in TRAINING_PASSES

    def entry(self, op: str, name: str) -> Entry:
        (found,) = (entry for entry in self.entries if (entry.op, entry.name) == (op, name))
        return found

    def impls_of(self, entry: Entry) -> Iterator[Impl]:
        for impl in self.impls():
            if impl.takes(self.pass_name, entry.case) and self.takes(impl, entry.case):
                yield impl


@functools.cache
def gpu_impls() -> list[Impl]:
    """What dispatch picks, every library that can be imported, and the floors of the passes that move
    states."""
    from bench.peers import peers  # imports them

    return [OURS, KEEPS, *peers(), COPY_STATE, COPY_DRAFTS, READ_STATE]


def gpu_impls_and_portable() -> list[Impl]:
    """Those, and ours with the kernels that every GPU has."""
    ours, *others = gpu_impls()
    return [ours, PORTABLE, *others]


def gpu_impls_for_few_heads() -> list[Impl]:
    """Those, ours in segments that join, and cuDNN's kernel with more and with less done beforehand."""
    from bench.peers import cudnn_forms

    ours, *others = gpu_impls()
    return [ours, JOINED, *others, *cudnn_forms()]


def _fla_kinds_only(impl: Impl, case: Case) -> bool:
    return (
        impl.name != "fla"
        or (case.algorithm, case.gate, case.packed, case.heads, case.value_heads) in FLA_KINDS
    )


def _cpu(name: str, pass_name: str, ops: tuple[str, ...]) -> Suite:
    entries = (Entry(op, *each) for op in ops for each in CPU_HEADLINES[op, pass_name].items())
    return Suite(name, "cpu", pass_name, tuple(entries), cpu_impls, cpu, ("src/cpu",))


def _gpu(
    name: str,
    pass_name: str,
    ops: tuple[str, ...],
    impls: Callable[[], list[Impl]] = gpu_impls,
    group: str = "gpu",
) -> Suite:
    entries = (
        Entry(op, name, case)
        for op in ops
        for name, case in HEADLINES[op, pass_name].items()
        if sum(case.lengths) * case.value_heads <= ONE_GPU
    )
    return Suite(name, group, pass_name, tuple(entries), impls, gpu, GPU_SOURCES)


def _steps(pass_name: str) -> Suite:
    suite = _gpu(pass_name, pass_name, ("kda", "gdn"))
    warm = tuple(
        dataclasses.replace(entry, name=f"{entry.name}-warm", warm=True)
        for entry in suite.entries
        if entry.case.sequences <= WARM_ROWS and entry.case.reads_only == (pass_name == "verify")
    )
    return dataclasses.replace(suite, entries=suite.entries + warm)


def _section(name: str) -> Suite:
    entries = (
        Entry(op, name, case, panel)
        for (op, panel), cases in SECTIONS[name].items()
        for name, case in cases.items()
    )
    return Suite(
        name,
        "hopper",
        "prefill",
        tuple(entries),
        gpu_impls,
        gpu,
        GPU_SOURCES,
        takes=_fla_kinds_only,
        brief=True,
    )


def _few_heads() -> Suite:
    entries = (
        Entry("kda", name, case, panel) for panel, cases in FEW_HEADS.items() for name, case in cases.items()
    )
    return Suite(
        "prefill_few_heads",
        "by name",
        "prefill",
        tuple(entries),
        gpu_impls_for_few_heads,
        gpu,
        GPU_SOURCES,
        means=tuple(frozenset(list(cases)[: len(FEW_HEADS_OF_THE_MEAN)]) for cases in FEW_HEADS.values()),
    )


SUITES = {
    suite.name: suite
    for suite in (
        _cpu("cpu_prefill", "prefill", ("kda", "gdn", "gla", "lightning")),
        _cpu("cpu_decode", "decode", ("kda", "gdn", "lightning")),
        _cpu("cpu_verify", "verify", ("kda", "gdn")),
        *(_cpu(f"cpu_{name}", name, ("kda", "gdn")) for name in TRAINING_PASSES),
        *(_steps(name) for name in ("decode", "verify")),
        _gpu("kda_prefill", "prefill", ("kda",), gpu_impls_and_portable),
        _gpu("gdn_prefill", "prefill", ("gdn",)),
        _gpu("lightning_prefill", "prefill", ("lightning",)),
        _gpu("gla_prefill", "prefill", ("gla",)),
        *(
            _gpu(f"{op}_{name}", name, (op,))
            for op in ("gdn2", "gdp", "rwkv7")
            for name in ("prefill", "decode")
        ),
        *(_section(name) for name in SECTIONS),
        _few_heads(),
        *(_gpu(f"{op}_{name}", name, (op,), group="training") for op in TRAINING for name in TRAINING_PASSES),
    )
}

GROUPS = {
    group: tuple(name for name, suite in SUITES.items() if suite.group == group)
    for group in ("cpu", "gpu", "hopper", "training")
}
