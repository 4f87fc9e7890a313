# SPDX-License-Identifier: Apache-2.0
"""python -m bench: measure, print, and write bench/results/<device>/<suite>.json."""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path

import torch

from bench import cost, machine, results
from bench.accuracy import Oracle
from bench.impls import Impl, states_of, verify_inputs
from bench.measure import interleaved
from bench.results import RESULTS, Row
from bench.suites import SUITES, Suite
from cases import Case, Inputs, make

QUIET_LOAD = 0.5
ROTATE_BYTES_LIMIT = 1 << 30  # of all sets of inputs together


def rotating(pass_name: str, case: Case) -> list[Inputs]:
    """Copies of one case's inputs, as many as outgrow the caches (within ROTATE_BYTES_LIMIT), at least one."""
    first = make(case)
    if pass_name == "verify":
        first = verify_inputs(first)
    size = cost.moved_bytes(pass_name, first)
    wanted = min(1.25 * machine.last_level_cache_bytes(), ROTATE_BYTES_LIMIT)
    return [first, *(first.map(torch.clone) for _ in range(math.ceil(wanted / size) - 1))]


def measure(suite: Suite, op: str, name: str, case: Case, impls: list[Impl]) -> list[Row]:
    pass_name = suite.pass_name
    sets = rotating(pass_name, case)
    oracle = Oracle(pass_name, sets[0])
    errors: dict[str, tuple[float | None, float | None]] = {}
    for impl in impls:
        if impl.computes:
            inputs = sets[0].map(torch.clone)
            o, states = impl.bind(pass_name, inputs)()
            errors[impl.name] = oracle.errors(o, states_of(pass_name, inputs, states))
    seconds = interleaved({impl.name: [impl.bind(pass_name, inputs) for inputs in sets] for impl in impls})

    def row(impl: Impl) -> Row:
        moved = cost.moved_bytes(pass_name, sets[0]) if impl.computes else 2 * case.sequences * cost.state_bytes(case)
        out_error, state_error = errors.get(impl.name, (None, None))
        return Row(
            suite.name,
            op,
            pass_name,
            name,
            impl.name,
            gpu_ms=None,
            call_ms=seconds[impl.name] * 1e3,
            gb=moved / 1e9,
            gflop=cost.flops(pass_name, case) / 1e9 if impl.computes else 0.0,
            rel_err_out=out_error,
            rel_err_state=state_error,
        )

    return [row(impl) for impl in impls]


def show(row: Row, ours_ms: float, head: dict) -> None:
    bandwidth = row.gb / row.call_ms / head["copy_tbps"]
    rate = row.gflop / row.call_ms / head["gemm_tflops"]
    error = "" if row.rel_err_out is None else f"  out {row.rel_err_out:.1e}  state {row.rel_err_state:.1e}"
    print(
        f"{row.op:10} {row.pass_name:8} {row.case:12} {row.impl:20} {row.call_ms:10.3f} ms"
        f"  x{row.call_ms / ours_ms:<7.2f} {bandwidth:5.0%} of copy {rate:5.0%} of gemm{error}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "suites", nargs="*", metavar="suite", choices=[[], *SUITES], help=f"{', '.join(SUITES)}; default: all"
    )
    parser.add_argument("--case", default="", help="regular expression on 'op/case'; results are printed, not written")
    parser.add_argument("--impl", default="", help="regular expression on the implementation; likewise")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()

    # A decaying state passes through the denormal range, which plain PyTorch then crawls through.
    torch.set_flush_denormal(True)
    torch.set_grad_enabled(False)
    if (busy := os.getloadavg()[0]) > QUIET_LOAD:
        print(f"others are using this machine (load {busy:.1f}): times will be too long, short calls' most of all")
    head: dict = {}
    for suite in map(SUITES.get, options.suites or SUITES):
        head = {**(head or machine.describe(suite.sources)), "source_hash": machine.source_hash(suite.sources)}
        print(
            f"{suite.name} on {head['device']}: copy {head['copy_tbps']} TB/s, bf16 gemm {head['gemm_tflops']} TFLOP/s"
        )
        rows: list[Row] = []
        for op, name, case in suite.rows():
            if not re.search(options.case, f"{op}/{name}"):
                continue
            impls = [impl for impl in suite.impls() if impl.takes(suite.pass_name, case)]
            impls = [impl for impl in impls if re.search(options.impl, impl.name)]
            if not impls:
                continue
            measured = measure(suite, op, name, case, impls)
            for row in measured:
                show(row, measured[0].call_ms, head)
            rows += measured
        if not (options.case or options.impl):
            print(f"wrote {results.write(options.output, suite.name, head, rows)}")


if __name__ == "__main__":
    main()
