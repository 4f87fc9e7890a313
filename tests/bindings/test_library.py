# SPDX-License-Identifier: Apache-2.0
"""The built library and the words around it: what it links, and that what the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cula import _library
from cula_testing.process import run_python

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cpu_only("about the built file and the README")
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_symbols_and_dependencies():
    run_python(str(ROOT / "tools" / "check_symbols.py"), str(_library.library()))


def test_the_readme_shows_python():
    assert BLOCKS


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_readme_runs(number, tmp_path):
    run_python("-c", BLOCKS[number], cwd=str(tmp_path))
