# SPDX-License-Identifier: Apache-2.0
"""Packages that are not installed, for the length of a test; and FLA, which is installed apart."""

# ruff: noqa: ARG002  (a finder's methods have all arguments)

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# tools/setup.sh puts FLA there, apart from the packages of the tests: most are about a Python without it.
FLA = Path(__file__).parents[2] / ".venv" / "fla"


def path_with_fla() -> str:
    """The import path of a process that has FLA: this one's, and FLA behind it."""
    if not FLA.is_dir() and importlib.util.find_spec("fla") is None:
        pytest.skip("FLA is not here: tools/setup.sh test installs it")
    return os.pathsep.join([*filter(None, sys.path), str(FLA)])


def install(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Modules by their dotted names, and the packages around them. They are made where they are imported, as
    those of an installed package are."""
    contents = dict(contents)
    for path in list(contents):
        parts = path.split(".")
        assert parts[0] not in sys.modules
        for end in range(1, len(parts)):
            contents.setdefault(".".join(parts[:end]), {})
    monkeypatch.setattr(sys, "meta_path", [_Finder(contents), *sys.meta_path])


def remove(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


class _Finder:
    def __init__(self, contents: Mapping[str, Mapping[str, Any]]) -> None:
        self._contents = contents

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self._contents:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._contents[module.__name__])
