# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of the passes of training from bench/results, for tools/update_docs.py."""

from __future__ import annotations

from collections import defaultdict

from result_tables import (
    NONE_YET,
    PEERS,
    Times,
    as_table,
    cases_of,
    cpu_caption,
    duration,
    gpu_caption,
    prose,
    result_files,
    slower,
    times_as_long,
    wrapped,
)

NO_TRAINING_YET = ["Not measured yet: run `python -m bench --suite training` on a machine with a GPU."]
PASSES = ("backward", "train")
NAMES = {
    "cula": "cula",
    "cula:disable_recompute": "cula, nothing recomputed",
    **PEERS,
    "fla:disable_recompute": "FLA, nothing recomputed",
}
GRADIENTS = ("q", "k", "v", "g", "beta", "erase", "A_log", "dt_bias")


def _names_in(cases: Times) -> dict[str, str]:
    """The implementations that have a figure."""
    found = {name for impls in cases.values() for name in impls}
    return {name: title for name, title in NAMES.items() if name in found}


def _runs(*, gpu: bool = True) -> list[tuple[dict, Times]]:
    """Every GPU's results, or every CPU's, those of one run under one head, which has what was refused in any
    of them."""
    runs: dict[tuple[str, str], tuple[dict, Times]] = {}
    for pass_name in PASSES:
        for result in result_files(f"*_{pass_name}"):
            if (result["driver"] is not None) != gpu:
                continue
            key = (result["device"], result["source_hash"])
            head, cases = runs.setdefault(key, ({**result, "refused": []}, {}))
            head["refused"] += result.get("refused", [])
            for (op, case), impls in cases_of(result).items():
                cases[f"{op} {pass_name}", case] = impls
    return list(runs.values())


def _cell(row: dict | None, ours: dict | None) -> str:
    if row is None:
        return "-"
    beside = "" if ours is None or row is ours else f" ({times_as_long(row, ours)})"
    return f"{row['gpu_ms']:.3f}{beside}, {row['peak_gb']:.2f}"


def _times(cases: Times) -> list[str]:
    names = _names_in(cases)
    rows = [
        [call, case, *(_cell(impls.get(name), impls.get("cula")) for name in names)]
        for (call, case), impls in cases.items()
    ]
    return as_table(["call", "case", *(f"{title}: ms, GB" for title in names.values())], rows)


def _first_calls(cases: Times) -> list[str]:
    """How long a call takes in a fresh process, where that was measured."""
    lines = []
    for (call, case), impls in cases.items():
        found = [
            f"{title} {duration(ms)}"
            for name, title in NAMES.items()
            if name in impls and (ms := impls[name]["first_call_ms"]) is not None
        ]
        if found:
            lines += prose(f"- first call of {call} {case}: {'; '.join(found)}", "  ")
    return [*lines, ""] if lines else []


def _refusals(refused: list[dict]) -> list[str]:
    """What is not measured, by reason."""
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in refused:
        what = f"{row['op']} {row['case']}"
        if what not in (known := cases[row["impl"], row["reason"]]):
            known.append(what)
    lines = []
    for (impl, reason), names in cases.items():
        lines += prose(f"- {NAMES.get(impl, impl)} does not run {', '.join(names)}: {reason}", "  ")
    return [*lines, ""] if lines else []


def gpu_training() -> list[str]:
    """Device time and memory of ours and the peers, and their first calls."""
    lines: list[str] = []
    for result, cases in _runs():
        table = [*_times(cases), "", *_first_calls(cases)] if cases else []
        lines += [*wrapped(gpu_caption(result)), *table, *_refusals(result["refused"])]
    return lines[:-1] or NO_TRAINING_YET


def gpu_gradients() -> list[str]:
    """Errors of every gradient, of the backward pass where a case has both."""
    lines: list[str] = []
    for _, cases in _runs():
        kept: Times = {}
        for (call, case), impls in cases.items():
            op, pass_name = call.split()
            if pass_name == PASSES[0] or (f"{op} {PASSES[0]}", case) not in cases:
                kept[op, case] = impls
        rows, names = [], _names_in(kept)
        for (op, case), impls in kept.items():
            for name in (name for name in names if name in impls):
                errors = impls[name]["rel_err_gradients"]
                cells = [f"{errors[each]:.1e}" if each in errors else "-" for each in GRADIENTS]
                rows.append([op, case, names[name], *cells])
        if rows:
            head = ["op", "case", "gradients of", *(f"d_{name}" for name in GRADIENTS)]
            lines += [*as_table(head, rows), "", *_beside_fla(kept), ""]
    return lines[:-1] or NO_TRAINING_YET


def _beside_fla(cases: Times) -> list[str]:
    both = [
        (ours, fla["rel_err_gradients"][name])
        for impls in cases.values()
        if (fla := impls.get("fla")) is not None and "cula" in impls
        for name, ours in impls["cula"]["rel_err_gradients"].items()
    ]
    if not both:
        return ["There is no case that both cula and FLA run."]
    count = sum(ours <= fla for ours, fla in both)
    return [f"Our error is no larger than FLA's in {count} of {len(both)} gradients that both compute."]


def cpu_training() -> list[str]:
    """Ours beside the chunk form in PyTorch under autograd."""
    lines: list[str] = []
    for result, cases in _runs(gpu=False):
        rows = []
        for (call, case), impls in cases.items():
            ours, eager = impls["cula"], impls["eager_chunk"]
            errors = [max(row["rel_err_gradients"].values()) for row in (ours, eager)]
            cells = [f"{ours['call_ms']:.0f}", slower(eager, ours), *(f"{error:.1e}" for error in errors)]
            rows.append([call, case, *cells])
        head = ["call", "case", "ms", "eager chunk form takes", "largest error of a gradient", "eager's"]
        lines += [*wrapped(cpu_caption(result)), *as_table(head, rows), ""]
    return lines[:-1] or NONE_YET


def readme() -> list[str]:
    """The cases that ours has figures of; nothing where there are none."""
    lines: list[str] = []
    for result, cases in _runs():
        if measured := {key: impls for key, impls in cases.items() if "cula" in impls}:
            lines += [*wrapped(gpu_caption(result)), *_times(measured), ""]
    words = (
        "Training on a GPU: a backward pass alone, and one with its forward pass through autograd. Device"
        " time, and the most memory beside the inputs:"
    )
    return [*prose(words), "", *lines[:-1]] if lines else [""]


if __name__ == "__main__":
    for table in (gpu_training, gpu_gradients, cpu_training, readme):
        print("\n".join(table()), end="\n\n")
