# SPDX-License-Identifier: Apache-2.0
"""The Markdown table of decode and verification with states of every kind from bench/results, for
tools/update_docs.py."""

from __future__ import annotations

from result_tables import (
    GPU_STEPS,
    as_table,
    gpu_caption,
    gpu_results,
    is_headline,
    share_of,
    times_as_long,
    wrapped,
)

NOT_YET = ["Not measured yet: run `python -m bench --suite decode,verify` on a machine with a GPU."]

# What ours is a share of, the first that a case has.
FLOORS = {"read_state": "reading", "copy_drafts": "copying to the drafts", "copy_state": "copying"}


def _cells(impls: dict[str, dict]) -> list[str]:
    """Ours, its share of the floor, and FlashInfer's and FLA's time in units of ours."""
    if "cula" not in impls:
        return ["-"] * 4
    ours = impls["cula"]
    floor = next((impls[name] for name in FLOORS if name in impls), None)
    beside = [times_as_long(impls.get(name), ours) for name in ("flashinfer", "fla")]
    return [f"{1e3 * ours['gpu_ms']:.1f}", share_of(floor, ours), *beside]


def gpu_steps() -> list[str]:
    """Each case with its states in memory, and beside it with its states in the cache."""
    lines: list[str] = []
    for result, cases in gpu_results(GPU_STEPS):
        if all(is_headline(case) for _, case in cases):
            continue
        rows = []
        for (call, case), impls in cases.items():
            if case.endswith("-warm"):
                continue
            floor = next((words for name, words in FLOORS.items() if name in impls), "-")
            warm = cases.get((call, f"{case}-warm"), {})
            rows.append([call, case, floor, *_cells(impls), *_cells(warm)])
        columns = ["µs", "of it", "FlashInfer takes", "FLA takes"]
        head = ["call", "case", "floor", *columns, *(f"warm: {column}" for column in columns)]
        lines += [*wrapped(gpu_caption(result)), *as_table(head, rows), ""]
    return lines[:-1] or NOT_YET
