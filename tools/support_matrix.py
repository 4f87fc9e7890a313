# SPDX-License-Identifier: Apache-2.0
"""What each kernel of the registry takes, as a Markdown table. tools/update_docs.py puts it into the README."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# The package is this tree's unless another is on the path already.
sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))
import cula

ALGORITHMS = ("kda", "gdn", "gla", "simple_gla", "lightning", "linear", "delta", "delta_per_head")
PASSES = ("prefill", "decode", "verify", "segment")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _rows(**problem: object) -> dict[str, tuple[bool, str]]:
    """target: takes the problem, or the reason why not."""
    return {row.target: (row.verdict != "no", row.reason) for row in cula.explain(**problem, device="cpu")}


def absent_targets() -> set[str]:
    """Targets that this machine cannot run at all; it cannot tell what they would take."""
    found: dict[str, list[tuple[bool, str]]] = {}
    for dtype in DTYPES:
        for target, verdict in _rows(dtype=dtype).items():
            found.setdefault(target, []).append(verdict)
    return {target for target, all_of in found.items() if all(reason.startswith("this CPU") for _, reason in all_of)}


def _names(taken: list[str], everything: tuple[str, ...]) -> str:
    if len(taken) == len(everything):
        return "all"
    return ", ".join(taken) or "-"


def matrix() -> list[str]:
    """The lines of the table, a row per target in order of preference."""
    dtypes = {str(dtype).removeprefix("torch."): _rows(dtype=dtype) for dtype in DTYPES}
    targets = list(_rows())
    lines = ["| target | inputs | " + " | ".join(PASSES) + " |", "|---" * (2 + len(PASSES)) + "|"]
    for target in targets:
        taken = [name for name, rows in dtypes.items() if rows[target][0]]
        widest = getattr(torch, taken[0]) if taken else torch.bfloat16
        cells = []
        for pass_name in PASSES:
            known = [
                a
                for a in ALGORITHMS
                if _rows(algorithm=a, pass_name=pass_name, dtype=widest).get(target, (False, ""))[0]
            ]
            cells.append(_names(known, ALGORITHMS))
        lines.append(f"| `{target}` | {', '.join(taken)} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(matrix()))
