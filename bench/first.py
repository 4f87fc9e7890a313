# SPDX-License-Identifier: Apache-2.0
"""The first call of a fresh process: python -m bench.first SUITE OP CASE IMPL prints how long it takes.

Imports, the CUDA context and the inputs are there before the clock starts, and the forward pass that a
backward pass is of; loading, compiling and tuning of the call's own kernels are not. PyTorch's own start of
its backward passes is over too: the first one from a given gradient imports sympy, whoever computes it. The
process of a call of ours has nobody else's library in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from bench import ROOT
from bench.suites import SUITES, Suite
from cula.bench.impls import OURS, Impl, inputs_of
from cula_testing.cases import TRAINING_PASSES, Case

Call = tuple[str, str, str, str]  # suite, op, case, implementation
Kinds = set[str]  # of kernels that FLA compiles and tunes for a call

# Ours and other libraries without tuning: one call of each kind.
COMPILED = (
    ("kda_prefill", "kda", "T8192-H64"),
    ("decode", "kda", "N1-H32"),
    *((f"kda_{name}", "kda", "T8192-H64") for name in TRAINING_PASSES),
)

FLA_NORM_ROWS = 1 << 16  # its l2norm is another kernel for every started 65,536 rows


def _start(call: Call, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "bench.first", *call]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def _answer(process: subprocess.Popen) -> float | None:
    """Milliseconds, from the last line that it printed."""
    printed = process.communicate()[0].split()
    return float(printed[-2]) if process.returncode == 0 and printed[-1:] == ["ms"] else None


def of_compiled(calls: Iterable[Call]) -> dict[Call, float | None]:
    """One after the other, each with the machine to itself. What compiles at first use does so."""
    times = {}
    for call in calls:
        with tempfile.TemporaryDirectory() as folder:
            times[call] = _answer(_start(call, CUDNN_FRONTEND_CAKE_CACHE_DIR=folder))
    return times


def is_tuned(impl: str) -> bool:
    return impl.partition(":")[0] == "fla"


def kinds(pass_name: str, impl: str, case: Case) -> Kinds:
    """FLA compiles and tunes once for all calls that agree in these. A backward pass comes after the forward
    pass of its step, so both passes of training need the same kernels."""
    trains = pass_name in TRAINING_PASSES
    what = f"train {impl}" if trains else pass_name
    found = {f"{what} {case.algorithm} {case.gate} packed={case.packed} {case.heads}/{case.value_heads}"}
    if (trains or pass_name == "prefill") and case.qk_l2norm:
        found.add(
            f"l2norm {'train ' if trains else ''}{-(-case.batch * case.tokens * case.heads // FLA_NORM_ROWS)}"
        )
    return found


def _cache_record() -> Path:
    """Beside the kernels that Triton compiled, and gone with them."""
    return Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")) / "cula-bench.json"


def kinds_in_cache() -> Kinds:
    path = _cache_record()
    return set(json.loads(path.read_text())) if path.exists() else set()


def of_tuned(calls: dict[Call, Kinds]) -> dict[Call, float | None]:
    """All at once: each compiles for a minute or more, mostly on one core. What they compile, later processes
    find.

    What they find out about speed while they disturb each other is thrown away. A call that is new in its
    norm alone runs for the sake of the cache; its time would tell nothing.
    """
    processes = {call: _start(call, FLA_CACHE_RESULTS="0") for call in calls}
    times = {call: _answer(process) for call, process in processes.items()}
    compiled = kinds_in_cache().union(*(calls[call] for call, taken in times.items() if taken is not None))
    path = _cache_record()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted(compiled)))
    return {
        call: taken
        for call, taken in times.items()
        if not all(kind.startswith("l2norm") for kind in calls[call])
    }


def _impl(suite: Suite, name: str) -> Impl:
    """Ours without a look at the others, which would import them."""
    return OURS if name == OURS.name else next(impl for impl in suite.impls() if impl.name == name)


def start_autograd(device: str) -> None:
    """A backward pass of PyTorch alone, from a gradient that is given, of a tensor of nobody's."""
    x = torch.zeros(1, device=device, requires_grad=True)
    with torch.enable_grad():
        y = 2 * x
    torch.autograd.grad(y, x, torch.ones_like(y))


def main() -> None:
    suite_name, op, case_name, impl_name = sys.argv[1:]
    suite = SUITES[suite_name]
    torch.set_grad_enabled(False)
    inputs = inputs_of(suite.pass_name, suite.entry(op, case_name).case, suite.device.DEVICE)
    try:
        call = _impl(suite, impl_name).bound(suite.pass_name, inputs)
    except NotImplementedError as error:
        raise SystemExit(str(error)) from None
    if suite.trains:
        start_autograd(suite.device.DEVICE)
    suite.device.wait()
    start = time.perf_counter()
    call()
    suite.device.wait()
    print(f"{1e3 * (time.perf_counter() - start):.3f} ms")


if __name__ == "__main__":
    main()
