# SPDX-License-Identifier: Apache-2.0
"""Result files: bench/results/<device>/<suite>.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

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
    rel_err_out: float | None
    rel_err_state: float | None
    gpu_timing: str | None = None  # how gpu_ms was taken, see bench.measure
    host_ms: float | None = None  # until the call returns, in a loop that does not wait for the device
    first_call_ms: float | None = None  # the first call of a fresh process, after the import

    def to_json(self) -> dict:
        return {("pass" if name == "pass_name" else name): value for name, value in asdict(self).items()}


def write(folder: Path, suite: str, machine: dict, rows: list[Row]) -> Path:
    path = folder / file_safe(machine["device"]) / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine, "cases": [row.to_json() for row in rows]}, indent=1) + "\n")
    return path


def load(folder: Path = RESULTS) -> list[tuple[Path, dict]]:
    """Every benchmark's result file and its contents. (Test runs leave theirs in the same folders.)"""
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*/*.json"))]
    return [(path, result) for path, result in found if "copy_tbps" in result]
