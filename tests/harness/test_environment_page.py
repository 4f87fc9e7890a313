# SPDX-License-Identifier: Apache-2.0
"""docs/guide/environment.md against the sources: it lists the variables that they read, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("about a page")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "environment.md").read_text()
METHODS = ("get", "setdefault", "pop")


def listed(section: str) -> set[str]:
    """The variables of a section's table."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^\| `([A-Z_]+)", text, re.MULTILINE))


def files(folders: Iterable[str], *endings: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    assert found
    return found


def reads(text: str) -> Iterator[str | None]:
    """Names that a Python source looks up in the environment; None for one that it does not spell out."""
    tree = ast.parse(text)
    known = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def name_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return known.get(node.id) if isinstance(node, ast.Name) else None

    def is_environment(node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "environ"

    def stored(node: ast.Subscript) -> bool:
        return not isinstance(node.ctx, ast.Load)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_environment = is_environment(node.func.value) and node.func.attr in METHODS
            if of_environment or node.func.attr == "getenv":
                yield name_of(node.args[0])
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            yield name_of(node.left)
        elif isinstance(node, ast.Subscript) and is_environment(node.value) and not stored(node):
            yield name_of(node.slice)


def of_python(*folders: str) -> set[str | None]:
    return {name for path in files(folders, ".py") for name in reads(path.read_text())}


def of_cpp(*folders: str) -> set[str]:
    found: set[str] = set()
    for path in files(folders, ".cc", ".h", ".cu", ".cuh"):
        calls = re.findall(r"\bgetenv\(([^)]*)\)", path.read_text())
        assert all(re.fullmatch(r'"\w+"', call) for call in calls), f"{path} does not spell out a name"
        found |= {call.strip('"') for call in calls}
    return found


def test_at_run_time():
    assert listed("At run time") == of_python("python/cula") | of_cpp("src", "include", "bindings")


def test_when_it_is_built():
    build = [ROOT / "CMakeLists.txt", *files(["cmake"], ".cmake", ".in")]
    read = {name for path in build for name in re.findall(r"\bENV\{(\w+)\}", path.read_text())}
    assert listed("When it is built") == read


def test_in_a_clone():
    """Those of the project's own name; pytest, Triton and torchrun have theirs."""
    of_scripts = {
        name for path in files(["tools"], ".sh") for name in re.findall(r"\$\{(CULA_\w+)", path.read_text())
    }
    of_programs = of_python("bench", "tests", "tools", "examples")
    ours = {name for name in of_programs if name is not None and name.startswith("CULA_")}
    assert listed("In a clone") == (ours | of_scripts) - listed("At run time")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('import os\nos.environ.get("A", "0")', ["A"]),
        ('import os as _os\nif "A" in _os.environ: pass', ["A"]),
        ('import os\nNAME = "A"\ndef f(): return os.environ[NAME]', ["A"]),
        ('import os\nos.environ.setdefault("A", "0"); os.getenv("B"); os.environ.pop("C")', ["A", "B", "C"]),
        ('import os\nos.environ["A"] = "0"', []),
        ("import os\nos.environ.get(name)", [None]),
    ],
)
def test_what_counts_as_reading(text, names):
    assert sorted(reads(text), key=str) == names
