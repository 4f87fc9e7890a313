# SPDX-License-Identifier: Apache-2.0
"""What the demo and the training share: the text, a clock, tables and checks."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

PICTURES = Path(__file__).resolve().parent.parent / "build" / "demo"


def source_files() -> list[Path]:
    """The sources of the Python standard library, in no particular order."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for path in folder.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts)]


def distance(x: Tensor, reference: Tensor) -> float:
    """Relative root mean square."""
    return float((x.double() - reference.double()).norm() / reference.double().norm())


class Clock:
    """with Clock() as clock: ...; clock.seconds"""

    def __init__(self, device: torch.device) -> None:
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def __enter__(self) -> Clock:
        self.wait()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.seconds = time.perf_counter() - self.start


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, tuple("-" * width for width in widths), *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_checks(checks: Mapping[str, Sequence[tuple[float, float]]]) -> bool:
    """Prints what each check found and allows; whether all hold."""
    good = True
    for name, numbers in checks.items():
        passed = all(found <= allowed for found, allowed in numbers)
        good = good and passed
        text = ", ".join(f"{found:.3g} of {allowed:.3g}" for found, allowed in numbers)
        print(f"  {'ok  ' if passed else 'FAIL'} {name}: {text}")
    return good
