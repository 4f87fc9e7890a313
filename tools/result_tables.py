# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from bench/results, for tools/update_docs.py: in README.md and docs/benchmarks.md."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
NONE_YET = ["No results are recorded yet: run `make bench`."]
NO_GPU_YET = ["Not measured yet: run `make gpu-bench` on a machine with a GPU."]
NO_RANKS_YET = ["Not measured yet: run `python -m bench --suite dist` on a machine with several GPUs."]
NO_SECTION_YET = ["Not measured yet: run `python -m bench --suite hopper` on a machine with a GPU."]
GPU_PREFILLS = tuple(f"{op}_prefill" for op in ("kda", "gdn", "lightning", "gla", "gdn2", "gdp", "rwkv7"))
GPU_STEPS = ("decode", "verify")
PEERS = {
    "flash_kda": "FlashKDA",
    "fla": "FLA",
    "cudnn": "cuDNN",
    "cudnn:given": "cuDNN, all given,",
    "cudnn:whole": "cuDNN's whole call",
    "flashinfer": "FlashInfer",
    "cula:sm90:joined": "`sm90:joined`",
}
PORTABLE = {"cula:sm80": "`sm80`"}  # ours, forced

Times = dict[tuple[str, str], dict[str, dict]]  # (op, case): impl: row
COLUMNS = 100  # of a line of prose; rows of tables cannot be broken


def prose(text: str, indent: str = "") -> list[str]:
    """Lines of at most COLUMNS columns; an empty one stays."""
    return (
        [""]
        if not text
        else textwrap.wrap(
            text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    )


def wrapped(lines: list[str]) -> list[str]:
    return [short for line in lines for short in prose(line)]


def result_files(suite: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"*/{suite}.json"))]


def cases_of(result: dict) -> Times:
    cases: Times = {}
    for row in result["cases"]:
        cases.setdefault((row["op"], row["case"]), {})[row["impl"]] = row
    return cases


def peers_in(results: list[Times]) -> dict[str, str]:
    """Those that have a figure in any of them."""
    found = {name for cases in results for impls in cases.values() for name in impls}
    return {name: title for name, title in PEERS.items() if name in found}


def cpu_caption(result: dict) -> list[str]:
    return [
        f"{result['device']}; copy {result['copy_tbps'] * 1e3:.0f} GB/s, bf16 matrix product"
        f" {result['gemm_tflops']:.2f} TFLOP/s; torch {result['torch']}; sources `{result['source_hash']}`.",
        "",
    ]


def as_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _tokens(case: str) -> int:
    return int(case.removeprefix("T").split("-")[0])


def slower(row: dict | None, ours: dict) -> str:
    return "-" if row is None else f"{row['call_ms'] / ours['call_ms']:.1f} x"


def prefill() -> list[str]:
    """Ours against plain PyTorch, for the cases that both run."""
    lines: list[str] = []
    for result in result_files("cpu_prefill"):
        rows = []
        for (op, case), impls in cases_of(result).items():
            if "eager_chunk" not in impls:
                continue
            ours = impls["cula"]
            rows.append(
                [
                    op,
                    case,
                    f"{ours['call_ms']:.1f}",
                    f"{1e3 * ours['call_ms'] / _tokens(case):.2f}",
                    slower(impls["eager_chunk"], ours),
                    slower(impls.get("eager_recurrent"), ours),
                    f"{ours['rel_err_out']:.1e}",
                ]
            )
        head = [
            "prefill",
            "case",
            "ms",
            "µs per token",
            "eager chunk form takes",
            "eager recurrence takes",
            "error of o",
        ]
        lines += [*wrapped(cpu_caption(result)), *as_table(head, rows), ""]
    return lines[:-1] or NONE_YET


def growth() -> list[str]:
    """µs per token against length."""
    lines: list[str] = []
    for result in result_files("cpu_prefill"):
        cases = cases_of(result)
        lengths = sorted({_tokens(case) for _, case in cases})
        rows = []
        for op in dict.fromkeys(op for op, _ in cases):
            own = {_tokens(case): impls["cula"] for (name, case), impls in cases.items() if name == op}
            rows.append([op, *(f"{1e3 * own[n]['call_ms'] / n:.2f}" if n in own else "-" for n in lengths)])
        head = ["µs per token", *(f"T = {n // 1024}K" for n in lengths)]
        lines += [*wrapped(cpu_caption(result)), *as_table(head, rows), ""]
    return lines[:-1] or NONE_YET


def targets() -> list[str]:
    """The CPU targets beside each other."""
    lines: list[str] = []
    for suite in ("cpu_prefill", "cpu_decode", "cpu_verify"):
        for result in result_files(suite):
            cases = {
                key: impls
                for key, impls in cases_of(result).items()
                if any(name.startswith("cula:") for name in impls)
            }
            names = list(dict.fromkeys(n for impls in cases.values() for n in impls if n.startswith("cula:")))
            rows = [
                [
                    suite.removeprefix("cpu_"),
                    *key,
                    *(f"{impls[n]['call_ms']:.3f}" if n in impls else "-" for n in names),
                ]
                for key, impls in cases.items()
            ]
            head = ["pass", "op", "case", *(f"{name.removeprefix('cula:')} ms" for name in names)]
            lines += [*as_table(head, rows), ""]
    return lines[:-1] or NONE_YET


def decode() -> list[str]:
    """Decode and verify beside a plain copy of the state."""
    lines: list[str] = []
    for suite in ("cpu_decode", "cpu_verify"):
        for result in result_files(suite):
            rows = []
            for (op, case), impls in cases_of(result).items():
                ours, copy = impls["cula"], impls["copy_state"]
                rows.append(
                    [
                        op,
                        case,
                        f"{1e3 * ours['call_ms']:.0f}",
                        f"{1e3 * copy['call_ms']:.0f}",
                        f"{ours['call_ms'] / copy['call_ms']:.2f}",
                        slower(impls.get("eager_recurrent"), ours),
                        f"{ours['rel_err_out']:.1e}",
                    ]
                )
            head = [
                suite.removeprefix("cpu_"),
                "case",
                "µs",
                "copy of the states, µs",
                "ratio",
                "eager recurrence takes",
                "error of o",
            ]
            lines += [*as_table(head, rows), ""]
    return lines[:-1] or NONE_YET


# In the names of what step_tables has: states in bfloat16, that are only read, that are in the cache.
MORE_STEPS = {"bf16", "read", "warm"}


def is_headline(case: str) -> bool:
    return MORE_STEPS.isdisjoint(case.split("-"))


def gpu_results(suites: tuple[str, ...]) -> list[tuple[dict, Times]]:
    """Every GPU's results of these suites, those of one run under one head."""
    runs: dict[tuple[str, str], tuple[dict, Times]] = {}
    for suite in suites:
        for result in result_files(suite):
            _, cases = runs.setdefault((result["device"], result["source_hash"]), (result, {}))
            for (op, case), impls in cases_of(result).items():
                if "cula" in impls:
                    cases[f"{op} {impls['cula']['pass']}", case] = impls
    return list(runs.values())


def gpu_caption(result: dict) -> list[str]:
    clocks = sorted({*result["clock_mhz"]})
    clock = (
        f", {clocks[0]} to {clocks[-1]} MHz" if len(clocks) > 1 else f", {clocks[0]} MHz" if clocks else ""
    )
    peers = "".join(f"; {name} {version}" for name, version in result.get("peers", {}).items())
    return [
        f"{result['device']}, driver {result['driver']}{clock}; copy {result['copy_tbps']:.2f} TB/s,"
        f" bf16 matrix product {result['gemm_tflops']:.0f} TFLOP/s; torch {result['torch']}{peers}; sources"
        f" `{result['source_hash']}`.",
        "",
    ]


def times_as_long(row: dict | None, ours: dict, key: str = "gpu_ms") -> str:
    return "-" if row is None else f"{row[key] / ours[key]:.2f} x"


def duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.0f} s" if milliseconds >= 1e3 else f"{milliseconds:.1f} ms"


def in_milliseconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def _error(row: dict | None) -> str:
    if row is None:
        return "-"
    found = (row["rel_err_out"], row["rel_err_state"])
    return ", ".join(f"{error:.1e}" for error in found if error is not None)


def share_of(floor: dict | None, ours: dict) -> str:
    return "-" if floor is None else f"{floor['gpu_ms'] / ours['gpu_ms']:.0%}"


def gpu_prefill() -> list[str]:
    """Ours and how many times as long the peers take, in device time."""
    lines: list[str] = []
    results = gpu_results(GPU_PREFILLS)
    peers = peers_in([cases for _, cases in results])
    for result, cases in results:
        rows = []
        forced = any(name in impls for impls in cases.values() for name in PORTABLE)
        beside = {**peers, **(PORTABLE if forced else {})}
        for (call, case), impls in cases.items():
            ours = impls["cula"]
            rows.append(
                [
                    call.removesuffix(" prefill"),
                    case,
                    f"{ours['gpu_ms']:.3f}",
                    *(times_as_long(impls.get(name), ours) for name in beside),
                    f"{ours['gb'] / ours['gpu_ms'] / result['copy_tbps']:.0%}",
                    f"{ours['gflop'] / ours['gpu_ms'] / result['gemm_tflops']:.0%}",
                ]
            )
        head = [
            "prefill",
            "case",
            "ms",
            *(f"{name} takes" for name in beside.values()),
            "of copy",
            "of matrix rate",
        ]
        lines += [*wrapped(gpu_caption(result)), *as_table(head, rows), ""]
    return lines[:-1] or NO_GPU_YET


def gpu_decode() -> list[str]:
    """Device time as a share of what copying takes, and the host's time, of the headlines."""
    lines: list[str] = []
    for result, cases in gpu_results(GPU_STEPS):
        rows = []
        for (call, case), impls in cases.items():
            if not is_headline(case):
                continue
            ours = impls["cula"]
            rows.append(
                [
                    call,
                    case,
                    f"{1e3 * ours['gpu_ms']:.1f}",
                    f"{ours['gb'] / ours['gpu_ms'] / result['copy_tbps']:.0%}",
                    share_of(impls.get("copy_drafts" if call.endswith("verify") else "copy_state"), ours),
                    f"{1e3 * ours['host_ms']:.1f}",
                    f"{1e3 * ours['call_ms']:.0f}",
                    times_as_long(impls.get("fla"), ours),
                    times_as_long(impls.get("fla"), ours, "call_ms"),
                ]
            )
        head = ["call", "case", "µs", "of copy", "of these states' copy", "host µs", "µs to result"]
        head += ["FLA takes", "FLA to result"]
        lines += [*wrapped(gpu_caption(result)), *as_table(head, rows), ""]
    return lines[:-1] or NO_GPU_YET


def gpu_calls() -> list[str]:
    """What a caller waits for, per call and at the first call of a process, every implementation."""
    lines: list[str] = []
    results = gpu_results(GPU_PREFILLS + GPU_STEPS)
    names = ("cula", *peers_in([cases for _, cases in results]))
    for _, cases in results:
        rows = []
        for (call, case), impls in cases.items():
            if not is_headline(case):
                continue
            found = [impls.get(name) for name in names]
            first = [None if row is None else row["first_call_ms"] for row in found]
            rows.append(
                [
                    call,
                    case,
                    *("-" if row is None else f"{row['gpu_ms']:.4f} / {row['call_ms']:.4f}" for row in found),
                    *("-" if ms is None else duration(ms) for ms in first),
                ]
            )
        head = [
            "call",
            "case",
            *(f"{name}, ms" for name in names),
            *(f"first: {name}" for name in names),
        ]
        lines += [*as_table(head, rows), ""]
    return lines[:-1] or NO_GPU_YET


def gpu_errors() -> list[str]:
    """Relative errors of output and states against the float64 recurrence."""
    lines: list[str] = []
    results = gpu_results(GPU_PREFILLS + GPU_STEPS)
    names = ("cula", *peers_in([cases for _, cases in results]))
    for _, cases in results:
        rows = [
            [call, case, *(_error(impls.get(name)) for name in names)]
            for (call, case), impls in cases.items()
            if not case.endswith("-warm")  # which has the errors of the case without
        ]
        lines += [*as_table(["call", "case", *(f"{name} o, states" for name in names)], rows), ""]
    return lines[:-1] or NO_GPU_YET


def _spread(lengths: str) -> str:
    """Shortest, middle and longest of a batch."""
    ordered = sorted(map(int, lengths.split()))
    return f"{ordered[0]}, {ordered[len(ordered) // 2]}, {ordered[-1]}"


def plots(suite: str, folder: str, what: str = "time against length") -> dict[Path, list[str]]:
    """Result file: its plot, if there is one, as a page whose way to the results is `folder` shows it."""
    return {
        path: [f"![{path.stem.replace('_', ' ')}, {what}]({folder}/{plot.relative_to(RESULTS)})", ""]
        if (plot := path.with_suffix(".png")).exists()
        else []
        for path in sorted(RESULTS.glob(f"*/{suite}.json"))
    }


def prefill_plot() -> list[str]:
    """For the README."""
    lines = [line for plot in plots("prefill_fixed", "bench/results").values() for line in plot]
    return lines[:-1] or NO_SECTION_YET


def section(suite: str) -> list[str]:
    """A section's plot, and each case's time beside the floor and the peers."""
    lines: list[str] = []
    shown = plots(suite, "../bench/results")
    results = {path: json.loads(path.read_text()) for path in shown}
    peers = peers_in([cases_of(result) for result in results.values()])
    for path, result in results.items():
        cases = {key: impls for key, impls in cases_of(result).items() if "cula" in impls}
        lengths = result.get("lengths", {})
        panels = list(dict.fromkeys((op, impls["cula"]["panel"]) for (op, _), impls in cases.items()))
        rows = []
        for (op, case), impls in cases.items():
            ours = impls["cula"]
            floor = ours["gb"] / result["copy_tbps"]
            cells = [
                f"{op}, {ours['panel']}",
                f"{ours['tokens']:,}",
                *([str(ours["sequences"]), _spread(lengths[f"{op}/{case}"])] if lengths else []),
                in_milliseconds(ours["gpu_ms"]),
                in_milliseconds(floor),
                f"{ours['gpu_ms'] / floor:.1f} x",
                *(times_as_long(impls.get(name), ours) for name in peers),
            ]
            rows.append((panels.index((op, ours["panel"])), ours["tokens"], ours["sequences"], cells))
        head = [
            "prefill",
            "tokens",
            *(["sequences", "lengths"] if lengths else []),
            "ms",
            "floor ms",
            "over floor",
            *(f"{name} takes" for name in peers.values()),
        ]
        table = as_table(head, [cells for *_, cells in sorted(rows)])
        lines += [*wrapped(gpu_caption(result)), *shown[path], *table, "", *errors_beside_fla(cases), ""]
    return lines[:-1] or NO_SECTION_YET


def errors_beside_fla(cases: Times) -> list[str]:
    both = [(impls["cula"], impls["fla"]) for impls in cases.values() if "fla" in impls]
    if not both:
        return ["FLA was not there to compare errors with."]
    counts = [sum(ours[key] <= fla[key] for ours, fla in both) for key in ("rel_err_out", "rel_err_state")]
    return [
        f"Our error is no larger than FLA's in {counts[0]} of the {len(both)} cases that both run for o,"
        f" {counts[1]} for the states."
    ]


def _rank_times(result: dict) -> dict[tuple[str, str, int], dict[str, dict]]:
    """(op, case, ranks): impl: row. On GPUs, of those whose device time could be taken."""
    found: dict[tuple[str, str, int], dict[str, dict]] = {}
    for row in result["cases"]:
        if result["driver"] is not None and row["gpu_ms"] is None:
            continue
        case = row["case"].rpartition("-x")[0]
        found.setdefault((row["op"], case, row["gpus"]), {})[row["impl"]] = row
    return found


def _of_ranks(row: dict) -> float:
    return row["call_ms"] if row["gpu_ms"] is None else row["gpu_ms"]


def several_ranks() -> list[str]:
    """Every way over several ranks beside one rank, the exchange's share, and FLA's context parallelism."""
    lines: list[str] = []
    for path, plot in plots("dist_x*", "../bench/results", "speed-up against ranks").items():
        result = json.loads(path.read_text())
        times, rows = _rank_times(result), []
        for (op, case, ranks), impls in times.items():
            for impl, row in impls.items():
                ours = impl != "fla"
                one = times.get((op, case, 1), {}).get("cula" if ours else "fla")
                taken, exchange = _of_ranks(row), row["exchange_ms"]
                fla = impls.get("fla")
                rows.append(
                    [
                        op,
                        case,
                        str(ranks),
                        impl.removeprefix("cula:").replace(
                            "cula", "what the cost model picks" if ranks > 1 else "-"
                        ),
                        f"{taken:.3f}",
                        "-" if one is None or ranks == 1 else f"{_of_ranks(one) / taken:.2f} x",
                        "-" if exchange is None else f"{1e3 * exchange:.0f} ({exchange / taken:.1%})",
                        "-" if fla is None or not ours else f"{_of_ranks(fla) / taken:.2f} x",
                        f"{row['difference']:.1e}",
                    ]
                )
        head = [
            "op",
            "case",
            "ranks",
            "method",
            "ms",
            "speed-up",
            "exchange, µs",
            "FLA takes",
            "difference from one rank",
        ]
        caption = cpu_caption(result) if result["driver"] is None else gpu_caption(result)
        lines += [*wrapped(caption), *plot, *as_table(head, rows), ""]
    return lines[:-1] or NO_RANKS_YET


SECTIONS: dict[str, Callable[[], list[str]]] = {
    suite.replace("_", "-"): functools.partial(section, suite)
    for suite in (
        "prefill_fixed",
        "prefill_ragged",
        "prefill_short",
        "prefill_models",
        "prefill_low_parallelism",
    )
}

if __name__ == "__main__":
    tables = (
        prefill,
        growth,
        decode,
        targets,
        gpu_prefill,
        gpu_decode,
        gpu_calls,
        gpu_errors,
        several_ranks,
        *SECTIONS.values(),
    )
    for table in tables:
        print("\n".join(table()), end="\n\n")
