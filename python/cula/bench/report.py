# SPDX-License-Identifier: Apache-2.0
"""The table and the JSON file of `python -m cula.bench`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PEERS = {"eager_chunk": "chunk form", "eager_recurrent": "recurrence", "fla": "FLA"}

LEGEND = """\
T tokens, H heads (16-64: of q and k, of v), N sequences; bfloat16, heads of 128, states in float32.
train: forward + backward. GB/s, TFLOP/s: what a call cannot do without; % of a copy, of a matrix product."""
OF_PEERS = {
    "eager_chunk": "chunk form, recurrence: how many times as long plain PyTorch takes.",
    "fla": "FLA: how many times as long it takes.",
}


@dataclass
class Result:
    """A row as measured. ms: device time on a GPU, else what the caller sees. gb, gflop: the bytes (1e9) and
    operations (1e9) that a call cannot do without. peers: milliseconds, by name. left_out: why, by name."""

    pass_name: str
    algorithm: str
    case: str
    tokens: int
    sequences: int
    heads: int
    value_heads: int
    target: str | None
    ms: float | None
    call_ms: float | None
    gb: float
    gflop: float
    peers: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {("pass" if name == "pass_name" else name): value for name, value in asdict(self).items()}


def _cells(row: Result, head: dict[str, Any], peers: list[str]) -> list[str]:
    cells = [row.pass_name, row.algorithm, row.case, row.target or "none"]
    if row.ms is None:
        return [*cells, *["-"] * (5 + len(peers))]
    times = [f"{row.peers[name] / row.ms:.1f} x" if name in row.peers else "-" for name in peers]
    gbps, tflops = row.gb / row.ms * 1e3, row.gflop / row.ms
    shares = f"{gbps / 1e3 / head['copy_tbps']:.0%}", f"{tflops / head['gemm_tflops']:.0%}"
    return [*cells, f"{row.ms:.3g}", *times, f"{gbps:.3g}", shares[0], f"{tflops:.3g}", shares[1]]


def machine(head: dict[str, Any]) -> str:
    """A line about the device, and one about the libraries."""
    driver = f", driver {head['driver']}" if head["driver"] else ""
    versions = [f"cula {head['cula']}", f"torch {head['torch']}"]
    versions += [f"{name} {version}" for name, version in head["peers"].items()]
    return (
        f"{head['device']}{driver}; copy {1e3 * head['copy_tbps']:.4g} GB/s, "
        f"bf16 matrix product {head['gemm_tflops']:.3g} TFLOP/s\n{', '.join(versions)}"
    )


def table(rows: list[Result], head: dict[str, Any]) -> str:
    """The rows under the machine's name, with a column for each peer that was measured or left out."""
    peers = [name for name in PEERS if any(name in (row.peers | row.left_out) for row in rows)]
    titles = ["pass", "algorithm", "case", "target", "ms", *(PEERS[name] for name in peers)]
    titles += ["GB/s", "%copy", "TFLOP/s", "%matmul"]
    lines = [titles, *(_cells(row, head, peers) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = 4  # columns on the left
    shown = [
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    legend = [LEGEND, *(text for name, text in OF_PEERS.items() if name in peers)]
    return "\n".join([machine(head), "", *shown, "", *legend, *_notes(rows)])


def _notes(rows: list[Result]) -> list[str]:
    """A sentence for each implementation and reason why it was left out."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.left_out.items():
            found.setdefault((name, reason), []).append(f"{row.pass_name} {row.algorithm}")
    return [
        f"{PEERS.get(name, name)} is left out of {', '.join(where)}: {reason}"
        for (name, reason), where in found.items()
    ]
