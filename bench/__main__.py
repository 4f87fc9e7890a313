# SPDX-License-Identifier: Apache-2.0
"""python -m bench: measure, print, and write bench/results/<device>/<suite>.json."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import dist, first, machine, results
from bench.accuracy import GradientOracle, Oracle, stand_in
from bench.results import RESULTS, Row
from bench.suites import GROUPS, SUITES, Entry, Suite
from cula.bench import cost, fla, gpu
from cula.bench.impls import OURS, Impl, inputs_of, rotating, states_of
from cula.bench.measure import Call
from cula_testing.cases import Case, Inputs

Errors = dict[str, dict]  # of each implementation, by the names of `Row`


def _inputs(suite: Suite, case: Case) -> Inputs:
    return inputs_of(suite.pass_name, case, suite.device.DEVICE)


def oracle_of(suite: Suite, inputs: Inputs) -> Oracle | GradientOracle:
    return GradientOracle(inputs) if suite.trains else Oracle(suite.pass_name, inputs)


def errors_of(suite: Suite, oracle: Oracle | GradientOracle, inputs: Inputs, impl: Impl) -> dict:
    own = inputs.map(torch.clone)
    if suite.trains:
        return {"rel_err_gradients": oracle.errors(impl.gradients(suite.pass_name, own))}
    given = impl.prepare(suite.pass_name, own)
    o, states = impl.bind(suite.pass_name, given)()
    errors = oracle.errors(o, states_of(suite.pass_name, given, states))
    return dict(zip(("rel_err_out", "rel_err_state"), errors, strict=True))


def peak_of(suite: Suite, inputs: Inputs, impl: Impl) -> float | None:
    """In GB, of a pass of training."""
    if not suite.trains:
        return None
    given = impl.prepare(suite.pass_name, inputs)
    found = suite.device.peak_bytes(lambda: impl.bind(suite.pass_name, given))
    return None if found is None else found / 1e9


class Run:
    """What the options ask for, and what was found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.whole = not (options.case or options.impl)
        self.output: Path | None = options.output or (RESULTS if self.whole else None)
        self.head: dict = {}
        self.known_errors: dict[tuple[str, Case], Errors] = {}
        self.first_calls: dict[first.Call, float | None] = {}
        self.failed = False
        self.rows: list[Row] = []
        self.refused: list[dict] = []  # of the suite that runs: what is not measured, and why

    def chosen(self, suite: Suite) -> Iterator[tuple[Entry, list[Impl]]]:
        for entry in suite.entries:
            takers = [impl for impl in suite.impls_of(entry) if re.search(self.options.impl, impl.name)]
            if takers and re.search(self.options.case, f"{entry.op}/{entry.name}"):
                yield entry, takers

    def suite(self, suite: Suite) -> None:
        if self.head.get("device") != suite.device.name():
            suite.device.prepare()
            self.head = machine.describe(suite.device)
        head = {**self.head, "source_hash": machine.source_hash(*suite.sources)}
        print(
            f"{suite.name} on {head['device']}: copy {head['copy_tbps']} TB/s, "
            f"bf16 gemm {head['gemm_tflops']} TFLOP/s",
            flush=True,
        )
        rows: list[Row] = []
        self.refused = []
        path, start = None, time.perf_counter()
        for entry, impls in self.chosen(suite):
            if entry.case.packed:
                head.setdefault("lengths", {})[f"{entry.op}/{entry.name}"] = " ".join(
                    map(str, entry.case.lengths)
                )
            measured = self.measure(suite, entry, impls)
            for row in measured:
                show(row, measured[0], head)
            rows += measured
            self.rows += measured
            head["refused"] = self.refused
            if self.output is not None and (rows or self.refused):
                path = self.write(suite, head, rows)
        for mean in results.means_of([row.to_json() for row in rows], suite.means):
            print(
                f"geometric mean of {mean['cases']}, {mean['panel']}: {mean['impl']:19} {mean['ms']:9.4f} ms"
            )
        if path is not None:
            head["clock_mhz"] = [*head["clock_mhz"], *suite.device.clock_mhz()]
            self.write(suite, head, rows)
            print(f"wrote {path}", flush=True)
        print(f"{suite.name}: {time.perf_counter() - start:.0f} s", flush=True)

    def write(self, suite: Suite, head: dict, rows: list[Row]) -> Path:
        return results.write(self.output, suite.name, head, rows, beside=not self.whole, groups=suite.means)

    def measure(self, suite: Suite, entry: Entry, impls: list[Impl]) -> list[Row]:
        op, name, case = entry.op, entry.name, entry.case
        one = _inputs(suite, case)
        sets = [one] if entry.warm else rotating(suite.pass_name, suite.device, one)
        small = stand_in(case, suite.device.ORACLE_TOKENS)
        errors = self.known_errors.setdefault((suite.name, small), {})
        if any(impl.computes and impl.name not in errors for impl in impls):
            sample = sets[0].map(torch.clone) if small == case else _inputs(suite, small)
            oracle = oracle_of(suite, sample)
        calls: dict[str, list[Call]] = {}
        peaks: dict[str, float | None] = {}
        for impl in impls:
            try:
                if impl.computes and impl.name not in errors:
                    errors[impl.name] = errors_of(suite, oracle, sample, impl)
                bound = [impl.bound(suite.pass_name, inputs) for inputs in sets]
                bound[0]()
                suite.device.wait()
                peaks[impl.name] = peak_of(suite, sets[0], impl)
            except Exception as error:  # whatever it is: a peer that cannot do a case is left out of it
                missing = isinstance(error, NotImplementedError)
                print(f"{op}/{name}: {impl.name} {'refuses' if missing else 'failed'}: {error}", flush=True)
                self.failed |= impl.name == OURS.name and not missing
                reason = " ".join(str(error).split())
                self.refused.append({"op": op, "case": name, "impl": impl.name, "reason": reason})
            else:
                calls[impl.name] = bound
        times = suite.device.times(calls, self.options.quick or suite.brief)
        moved = cost.moved_bytes(suite.pass_name, sets[0])

        def row(impl: Impl) -> Row:
            return Row(
                suite=suite.name,
                op=op,
                pass_name=suite.pass_name,
                case=name,
                impl=impl.name,
                panel=entry.panel,
                dtype=str(case.dtype).removeprefix("torch."),
                tokens=sum(case.lengths),
                sequences=case.sequences,
                heads=case.heads,
                value_heads=case.value_heads,
                key_dim=case.key_dim,
                value_dim=case.value_dim,
                gpu_ms=times[impl.name].gpu_ms,
                call_ms=times[impl.name].call_ms,
                gb=(moved if impl.moves is None else impl.moves(case)) / 1e9,
                gflop=cost.flops(suite.pass_name, case) / 1e9 if impl.computes else 0.0,
                gpu_timing=times[impl.name].gpu_timing,
                host_ms=times[impl.name].host_ms,
                first_call_ms=self.first_calls.get((suite.name, op, name, impl.name)),
                peak_gb=peaks[impl.name],
                state_dtype=str(case.state_dtype).removeprefix("torch.") if case.state else None,
                **errors.get(impl.name, {}),
            )

        return [row(impl) for impl in impls if impl.name in times]

    def find_first_calls(self, suites: list[Suite]) -> None:
        """On a GPU; with --quick only as far as they fill FLA's cache. Compiled libraries last, on a quiet
        machine."""
        compiled: list[first.Call] = []
        tuned: dict[first.Call, first.Kinds] = {}
        known = first.kinds_in_cache()
        for suite in suites:
            for entry, impls in self.chosen(suite) if suite.device is gpu else ():
                for impl in impls:
                    call = (suite.name, entry.op, entry.name, impl.name)
                    if first.is_tuned(impl.name):
                        if new := first.kinds(suite.pass_name, impl.name, entry.case) - known:
                            tuned[call] = new
                            known |= new
                    elif impl.computes and call[:3] in first.COMPILED and not self.options.quick:
                        compiled.append(call)
        if tuned:
            print(f"compiling FLA's kernels for {len(tuned)} kinds of call", flush=True)
            self.first_calls |= first.of_tuned(tuned)
        self.first_calls |= first.of_compiled(compiled)
        for call, milliseconds in self.first_calls.items():
            print(
                "first call:",
                *call,
                "failed" if milliseconds is None else f"{milliseconds:.1f} ms",
                flush=True,
            )


def time_of(row: Row) -> float:
    """Device time where it is known, else what the caller sees."""
    return row.call_ms if row.gpu_ms is None else row.gpu_ms


def show(row: Row, ours: Row, head: dict) -> None:
    time = time_of(row)
    host = (
        "" if row.host_ms is None else f"  call {1e3 * row.call_ms:.0f} us, host {1e3 * row.host_ms:.1f} us"
    )
    error = "" if row.rel_err_out is None else f"  out {row.rel_err_out:.1e}"
    error += "" if row.rel_err_state is None else f"  state {row.rel_err_state:.1e}"
    error += "".join(f"  d_{name} {value:.1e}" for name, value in (row.rel_err_gradients or {}).items())
    peak = "" if row.peak_gb is None else f"  peak {row.peak_gb:.2f} GB"
    print(
        f"{row.op:9} {row.pass_name:7} {row.case:26} {row.impl:19} {time:9.4f} ms"
        f"  x{time / time_of(ours):<6.2f} {row.gb / time / head['copy_tbps']:4.0%} of copy"
        f" {row.gflop / time / head['gemm_tflops']:4.0%} of gemm{host}{peak}{error}",
        flush=True,
    )


def summary(rows: list[Row]) -> None:
    """A line per case: our time, and how many times as long the others take."""
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.op, row.pass_name, row.case), {})[row.impl] = row
    for (op, pass_name, case), impls in cases.items():
        if (ours := impls.pop(OURS.name, None)) is not None:
            others = (f"{name} x{time_of(row) / time_of(ours):.2f}" for name, row in impls.items())
            print(f"{op:9} {pass_name:7} {case:26} {time_of(ours):9.4f} ms  {', '.join(others)}")


def suites_named(text: str) -> list[Suite] | str:
    if text == dist.NAME:  # in processes of its own, so not beside others
        return text
    suites: list[Suite] = []
    for name in text.split(","):
        if name not in GROUPS and name not in SUITES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of {', '.join((*GROUPS, *SUITES))}, or {dist.NAME} alone"
            )
        suites += [SUITES[each] for each in GROUPS.get(name, (name,))]
    return suites


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--suite",
        type=suites_named,
        default="cpu",
        metavar="NAME,...",
        help=f"{', '.join(GROUPS)} (groups), {', '.join(SUITES)}, or {dist.NAME} alone; default: cpu",
    )
    parser.add_argument("--case", default="", help="regular expression on 'op/case'")
    parser.add_argument("--impl", default="", help="regular expression on the implementation")
    parser.add_argument(
        "--quick", action="store_true", help="fewer samples, and no first calls in fresh processes"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the result files; default: bench/results, or none with --case or --impl",
    )
    options = parser.parse_args()

    torch.set_grad_enabled(False)
    if options.suite == dist.NAME:
        dist.run(options)
        return
    run = Run(options)
    if any(suite.device is gpu for suite in options.suite):
        if not torch.cuda.is_available():
            parser.error("these suites need a GPU, and torch finds none")
        run.find_first_calls(options.suite)
        fla.prepare()
    for suite in options.suite:
        run.suite(suite)
    summary(run.rows)
    if run.failed:
        raise SystemExit("cula failed in some cases, see above")


if __name__ == "__main__":
    main()
