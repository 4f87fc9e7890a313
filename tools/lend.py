# SPDX-License-Identifier: Apache-2.0
"""lend.py FOLDER PROJECT...: links into FOLDER what this Python has of these projects and of all that they
need, and nothing else, as if they were installed there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(projects: list[str]) -> dict[str, Distribution]:
    """The projects by their names, and what they need, with the extras that are asked for."""
    found: dict[str, Distribution] = {}
    seen, waiting = set(), [Requirement(project) for project in projects]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"lend: {name} is not installed")
        for each in map(Requirement, found[name].requires or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(each)
    return found


def entries(project: Distribution) -> Iterator[Path]:
    """The files and folders at the top of the import path that hold the project; scripts lie elsewhere."""
    names = {file.parts[0] for file in project.files or ()} - {"..", "__pycache__"}
    yield from (Path(str(project.locate_file(name))) for name in sorted(names))


def main(folder: Path, projects: list[str]) -> None:
    for project in needed(projects).values():
        for path in entries(project):
            if not (link := folder / path.name).exists():  # a folder may be that of several projects
                link.symlink_to(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
