# SPDX-License-Identifier: Apache-2.0
"""tools/Containerfile, as far as it can be looked at without a container: what it runs is there, and the
context that it copies holds every tracked file and nothing that was built."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = (ROOT / "tools" / "Containerfile").read_text().replace("\\\n", " ")


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def ignored(path: str) -> bool:
    """By .dockerignore, whose patterns here are folders, files, and names at any depth."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in "#"]
    for pattern in patterns:
        start = "(.*/)?" if pattern.startswith("**/") else ""
        body = re.escape(pattern.removeprefix("**/").removeprefix("/")).replace(r"\*", "[^/]*")
        if re.fullmatch(f"{start}{body}(/.*)?", path):
            return True
    return False


def test_every_tracked_file_is_copied():
    assert not [path for path in git("ls-files") if ignored(path)]
    assert not ignored(".git/HEAD")


def test_nothing_that_was_built_is_copied():
    built = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line and line[0] != "#"]
    for pattern in built:
        path = pattern.strip("/").replace("*", "some")
        assert ignored(path), pattern
        assert pattern.startswith("/") or ignored(f"some/folder/{path}"), pattern


def test_what_it_runs_is_there():
    (run,) = re.findall(r"^RUN (.*)$", RECIPE, re.MULTILINE)
    (target,) = re.findall(r"\bmake (\S+)$", run.strip())
    assert target == "wheel"
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, check=True)
    (folder,) = re.findall(r"^COPY --from=build /cula/(\S+)/ /$", RECIPE, re.MULTILINE)
    assert f"tools/make_wheel.sh {folder}\n" in (ROOT / "Makefile").read_text()


def test_it_names_no_place_of_images():
    """Those are given with --build-arg, and so is the index of PyTorch's builds for CPUs."""
    assert re.findall(r"^FROM (\S+)", RECIPE, re.MULTILINE) == ["${IMAGE}", "scratch"]
    assert re.findall(r"^ARG (\S+)$", RECIPE, re.MULTILINE) == ["IMAGE", "PIP_EXTRA_INDEX_URL"]
