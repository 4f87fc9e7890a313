# SPDX-License-Identifier: Apache-2.0
"""What each kernel of the registry takes, as Markdown tables. tools/update_docs.py puts them into the
README."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch

# The package is this tree's unless another is on the path already.
sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))
import cula

ALGORITHMS = tuple(cula.algorithms())
PASSES = ("prefill", "decode", "verify", "segment", "backward")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# What to ask about for a kind of device. A GPU need not be here: its kernels answer for any architecture.
PLACES = {"cpu": ("cpu",), "cuda": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")}

STRATEGIES = ("fused", "joined", "whole", "halves", "segments")

DECAYS = {
    "none": "none",
    "head": "per head, constant",
    "token": "per token",
    "channel": "per token and channel",
}

Answers = dict[tuple[str, str, torch.dtype], str]  # (pass, algorithm, dtype): why not, or ""
Form = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # per row of a target: dtypes, cells of the passes


def algorithms() -> list[str]:
    """The library's list of algorithms; `mode` names the function."""
    rows = [
        f"| `{row.name}` | {DECAYS[row.decay]} | {row.update} | `cula_{row.mode}` |"
        for row in cula.algorithms().values()
    ]
    return ["| algorithm | decay | update | function |", "|---|---|---|---|", *rows]


def _targets(place: str) -> dict[str, Answers]:
    """The targets made for this kind of device, in order of preference."""
    found: dict[str, Answers] = {}
    for pass_name, algorithm, dtype in product(PASSES, ALGORITHMS, DTYPES):
        writes = 2 if cula.algorithms()[algorithm].takes_several_writes else 1
        for row in cula.explain(algorithm, pass_name, dtype=dtype, device=place, writes=writes):
            # Not another kind's, nor one of several ways to run a prefill: the plain name stands for them.
            if not row.reason.startswith("runs on ") and row.target.partition(":")[2] not in STRATEGIES:
                found.setdefault(row.target, {})[pass_name, algorithm, dtype] = row.reason
    return found


def _names(taken: list[str], everything: tuple[str, ...]) -> str:
    left_out = [name for name in everything if name not in taken]
    if not left_out:
        return "all"
    return ", ".join(taken) or "-" if len(left_out) > len(taken) else f"all but {', '.join(left_out)}"


def _form(answers: Answers) -> Form:
    """What a target takes, dtypes with the same answers in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for dtype in DTYPES:
        cells = tuple(
            _names(
                [a for a in ALGORITHMS if answers.get((pass_name, a, dtype), "no such pass") == ""],
                ALGORITHMS,
            )
            for pass_name in PASSES
        )
        if any(cell != "-" for cell in cells):
            rows.setdefault(cells, []).append(str(dtype).removeprefix("torch."))
    return tuple((tuple(dtypes), cells) for cells, dtypes in rows.items())


def matrix(kind: str, before: list[str] = ()) -> list[str] | None:
    """The lines of the table for CPUs or GPUs; None where this build has no kernels of the kind.

    Targets that this CPU cannot run at all cannot tell here what they take: their rows are copied from
    `before`.
    """
    places = PLACES[kind]
    answers = {place: _targets(place) for place in places}
    if not answers[places[0]]:
        return None
    head = ["target", *(["GPUs"] if kind == "cuda" else []), "inputs", *PASSES]
    lines = [f"All GPUs: {', '.join(places)}.", ""] if kind == "cuda" else []
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for target in answers[places[0]]:
        if all(reason.startswith("this CPU") for reason in answers[places[0]][target].values()):
            lines += [line for line in before if line.startswith(f"| `{target}` |")]
            continue
        forms: dict[Form, list[str]] = {}
        for place in places:
            forms.setdefault(_form(answers[place][target]), []).append(place)
        for form, where in forms.items():
            gpus = [_names(where, places)] if kind == "cuda" else []
            for dtypes, cells in form:
                lines.append("| " + " | ".join([f"`{target}`", *gpus, ", ".join(dtypes), *cells]) + " |")
    return lines


if __name__ == "__main__":
    for kind in PLACES:
        print("\n".join([*(matrix(kind) or [f"This build has no {kind.upper()} kernels."]), ""]))
