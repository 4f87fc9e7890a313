# SPDX-License-Identifier: Apache-2.0
"""The first call of a fresh process: python -m bench.first SUITE OP CASE IMPL prints its milliseconds.

Imports, the CUDA context and the inputs are there before the clock starts; loading, compiling and tuning of kernels are
not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from bench import ROOT
from bench.impls import verify_inputs
from bench.suites import SUITES
from cases import Case, make

Call = tuple[str, str, str, str]  # suite, op, case, implementation

# Ours and other compiled libraries: one call of each kind.
COMPILED = (("kda_prefill", "kda", "T8192-H64"), ("decode", "kda", "N1-H32"))


def _start(call: Call, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "bench.first", *call]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def _answer(process: subprocess.Popen) -> float | None:
    printed = process.communicate()[0].split()
    return float(printed[-1]) if process.returncode == 0 and printed else None


def of_compiled(calls: Iterable[Call]) -> dict[Call, float | None]:
    """One after the other, each with the machine to itself."""
    return {call: _answer(_start(call)) for call in calls}


def kernel_cache_is_empty() -> bool:
    """Triton's, where FLA's kernels lie once they were compiled."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return not folder.is_dir() or not any(folder.iterdir())


def of_tuned(calls: Iterable[Call]) -> dict[Call, float | None]:
    """All at once: each compiles for a minute or more, mostly on one core. What they compile, later processes find.

    What they find out about speed while they disturb each other is thrown away.
    """
    processes = {call: _start(call, FLA_CACHE_RESULTS="0") for call in calls}
    return {call: _answer(process) for call, process in processes.items()}


def shape_class(suite: str, op: str, case: Case) -> tuple:
    """FLA compiles and tunes once for all cases that agree in this."""
    return suite, op, case.gate, case.packed, case.heads, case.value_heads


def main() -> None:
    suite_name, op, case_name, impl_name = sys.argv[1:]
    suite = SUITES[suite_name]
    torch.set_grad_enabled(False)
    inputs = make(suite.cases[op, suite.pass_name][case_name], suite.device.DEVICE, draw_on=suite.device.DEVICE)
    if suite.pass_name == "verify":
        inputs = verify_inputs(inputs)
    (impl,) = (impl for impl in suite.impls() if impl.name == impl_name)
    call = impl.bind(suite.pass_name, inputs)
    suite.device.wait()
    start = time.perf_counter()
    call()
    suite.device.wait()
    print(1e3 * (time.perf_counter() - start))


if __name__ == "__main__":
    main()
