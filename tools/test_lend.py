# SPDX-License-Identifier: Apache-2.0
"""tools/lend.py links a project and what it needs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEND = Path(__file__).with_name("lend.py")


@pytest.fixture
def installed(tmp_path):
    """One needs two, and for an extra three; four needs what is not there."""
    needs = {"one": ["two>=1", "three; extra == 'all'", "four; python_version < '3'"], "two": [], "three": []}
    site = tmp_path / "site"
    for name, requires in {**needs, "four": ["none"]}.items():
        information = site / f"{name}-1.0.dist-info"
        information.mkdir(parents=True)
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in requires)]
        (information / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]))
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("")
        files = [f"{name}/__init__.py", f"{information.name}/METADATA", f"../../bin/{name}"]
        (information / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return site


def lend(site: Path, folder: Path, *projects: str) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    program = f"import runpy, sys; sys.path.append({str(site)!r}); sys.argv = sys.argv[1:]; "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", program, LEND, folder, *projects], capture_output=True, text=True, check=False
    )


def test_what_is_needed(installed, tmp_path):
    folder = tmp_path / "lent"
    for _ in range(2):  # what is there already stays
        assert lend(installed, folder, "one").returncode == 0
        names = sorted(each.name for each in folder.iterdir())
        assert names == ["one", "one-1.0.dist-info", "two", "two-1.0.dist-info"]
    assert (folder / "one" / "__init__.py").is_file()
    assert lend(installed, folder, "two", "one[all]").returncode == 0
    assert (folder / "three" / "__init__.py").is_file()
    assert not (folder / "four").exists()


def test_what_is_not_here(installed, tmp_path):
    done = lend(installed, tmp_path / "lent", "four")
    assert (done.returncode, done.stderr) == (1, "lend: none is not installed\n")
