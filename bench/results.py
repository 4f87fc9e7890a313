# SPDX-License-Identifier: Apache-2.0
"""Result files: bench/results/<device>/<suite>.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

from bench import ROOT
from bench.machine import file_safe

RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Row:
    suite: str
    op: str
    pass_name: str
    case: str
    impl: str
    panel: str | None  # of a section's plot
    dtype: str
    tokens: int  # of all sequences
    sequences: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gpu_ms: float | None  # device time of all kernels of the call
    call_ms: float  # what the caller sees
    gb: float
    gflop: float
    rel_err_out: float | None = None
    rel_err_state: float | None = None
    gpu_timing: str | None = None  # how gpu_ms was taken, see cula.bench.measure
    host_ms: float | None = None  # until the call returns, in a loop that does not wait for the device
    first_call_ms: float | None = None  # the first call of a fresh process, after the import
    peak_gb: float | None = None  # what a pass of training holds at most beside its inputs
    rel_err_gradients: dict[str, float] | None = None  # by input
    state_dtype: str | None = None  # of the states that the call starts from

    def to_json(self) -> dict:
        return {("pass" if name == "pass_name" else name): value for name, value in asdict(self).items()}


# What the rows of one file have in common, beside the suite.
SAME = ("device", "driver", "torch", "cuda", "peers", "source_hash")


def _key(row: dict) -> tuple[str, str, str]:
    return row["op"], row["case"], row["impl"]


def means_of(cases: list[dict], groups: Iterable[frozenset[str]]) -> list[dict]:
    """The geometric mean of the times of each group of cases, of each implementation that has all of them."""
    found = []
    for names in groups:
        times: dict[str, dict[str, float]] = defaultdict(dict)
        panel = None
        for row in cases:
            if row["case"] in names:
                taken = row["call_ms"] if row["gpu_ms"] is None else row["gpu_ms"]
                times[row["impl"]][row["case"]] = taken
                panel = row["panel"]
        found += [
            {"panel": panel, "impl": impl, "cases": len(taken), "ms": geometric_mean(taken.values())}
            for impl, taken in times.items()
            if len(taken) == len(names)
        ]
    return found


def write(
    folder: Path,
    suite: str,
    head: dict,
    rows: list[Row],
    *,
    beside: bool = False,
    groups: Iterable[frozenset[str]] = (),
) -> Path:
    """beside: what a file of the same machine and sources has, and `rows` and the refusals of `head` have
    not, stays. groups: of cases, whose means are in the file too."""
    path = folder / file_safe(head["device"]) / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    cases, refused = [row.to_json() for row in rows], head.get("refused", [])
    before = json.loads(path.read_text()) if beside and path.exists() else {}
    if before and all(before[each] == head[each] for each in SAME):
        anew = {_key(row) for row in (*cases, *refused)}
        first = {_key(row): row["first_call_ms"] for row in before["cases"]}
        for row in cases:  # a first call is not measured again as long as what it compiled is there
            row["first_call_ms"] = row["first_call_ms"] or first.get(_key(row))
        cases = [row for row in before["cases"] if _key(row) not in anew] + cases
        refused = [row for row in before.get("refused", []) if _key(row) not in anew] + refused
        head = {**head, "lengths": {**before.get("lengths", {}), **head.get("lengths", {})}}
    told = {"refused": refused, "lengths": head.get("lengths")}
    head = {**head, **told}
    whole = {key: value for key, value in head.items() if value or key not in told}
    if means := means_of(cases, groups):
        whole["means"] = means
    path.write_text(json.dumps({**whole, "cases": cases}, indent=1) + "\n")
    return path


def load(folder: Path = RESULTS) -> list[tuple[Path, dict]]:
    """Every benchmark's result file and its contents. (Test runs leave theirs in the same folders.)"""
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*/*.json"))]
    return [(path, result) for path, result in found if "copy_tbps" in result]
