# SPDX-License-Identifier: Apache-2.0
"""The suites: which cases are measured with which implementations. One result file each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.impls import Impl, cpu_impls
from cases import CPU_HEADLINES, Case


@dataclass(frozen=True)
class Suite:
    name: str
    pass_name: str
    ops: tuple[str, ...]
    cases: dict[tuple[str, str], dict[str, Case]]  # (op, pass): name: case
    impls: Callable[[], list[Impl]]
    sources: str  # the kernels' folder, hashed into the result

    def rows(self) -> Iterator[tuple[str, str, Case]]:
        for op in self.ops:
            for name, case in self.cases[op, self.pass_name].items():
                yield op, name, case


SUITES = {
    suite.name: suite
    for suite in (
        Suite("cpu_prefill", "prefill", ("kda", "gdn", "gla", "lightning"), CPU_HEADLINES, cpu_impls, "src/cpu"),
        Suite("cpu_decode", "decode", ("kda", "gdn", "lightning"), CPU_HEADLINES, cpu_impls, "src/cpu"),
        Suite("cpu_verify", "verify", ("kda", "gdn"), CPU_HEADLINES, cpu_impls, "src/cpu"),
    )
}
