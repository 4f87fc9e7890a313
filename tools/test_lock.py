# SPDX-License-Identifier: Apache-2.0
"""What is installed is what is pinned, and every file of it has a hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = [
    "requirements",
    "requirements-dev",
    "requirements-fla",
    "requirements-site",
    "requirements-cuda",
    "requirements-wheel",
]


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_is_of_its_pins(name):
    wanted = pins((ROOT / f"{name}.txt").read_text())
    assert wanted
    wanted.pop("torch", None)
    text = (ROOT / f"{name}.lock").read_text()
    locked = pins(text)
    assert wanted.items() <= locked.items()
    assert "torch" not in locked
    for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry


def test_locks_agree():
    versions: dict[str, str] = {}
    for name in NAMES:
        for package, version in pins((ROOT / f"{name}.lock").read_text()).items():
            assert versions.setdefault(package, version) == version
