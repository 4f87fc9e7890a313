# SPDX-License-Identifier: Apache-2.0
"""check_tree.py: what CONTRIBUTING.md promises about the tree, as far as a program can see it.

Which folder of src/ may include which; the package imports itself by relative names; no kernel needs more
than 12 files to be read; no file above 600 lines; no line above 110 columns, prose of Markdown above 100;
pages of docs/design of at most 150 lines, with a drawing. Generated blocks and recorded files are left out,
and of docs/log the tables; the prose there has up to 110 columns.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES, MOST_COLUMNS, MOST_PROSE_COLUMNS, MOST_DESIGN_LINES, MOST_FILES = 600, 110, 100, 150, 12

SOURCES = re.compile(
    r".*\.(h|cc|cuh|py|sh|cmake|yml|md)|.*CMakeLists\.txt|Makefile|\.ci/run|tools/ptxas_limits\.txt"
)
LEFT_OUT = re.compile(r"bench/results/|licenses/")
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->\n?", re.DOTALL)

# Folder: the folders of src/ that it may include besides itself. Every folder of src/cuda/ is here; others
# that are not are free. Instructions and tile verbs know no kernel, no kernel knows another's folder, and no
# architecture another's.
CUDA = ("core", "cuda")  # the files of the folder itself: arguments, limits, the device
BELOW = (*CUDA, "cuda/ptx", "cuda/tile", "cuda/pipe")
MAY_INCLUDE = {
    "core": ("cuda/chunked/entry.h", "cuda/float8/entry.h", "cuda/forks/entry.h"),
    "cpu": ("core",),
    "reference": ("core",),
    "cuda": ("core", "cuda/tile/divisor.h", "cuda/pipe"),
    "cuda/ptx": (),
    "cuda/tile": ("cuda", "cuda/ptx", "core/float8.h"),
    "cuda/pipe": ("cuda", "cuda/ptx"),
    "cuda/chunked": BELOW,
    "cuda/backward": (*BELOW, "cuda/chunked"),
    "cuda/recurrent": (*BELOW, "cuda/backward/gradients.h"),
    "cuda/forks": BELOW,
    "cuda/float8": BELOW,
    "cuda/sm80": (*BELOW, "cuda/chunked", "cuda/backward"),
    "cuda/sm90": (
        *BELOW,
        "cuda/chunked",
        "cuda/backward",
        "cuda/sm90/carry",
        "cuda/sm90/fused",
        "cuda/sm90/gradients",
        "cuda/sm90/walks",
    ),
    "cuda/sm90/carry": (*BELOW, "cuda/chunked"),
    "cuda/sm90/gradients": (*BELOW, "cuda/chunked", "cuda/backward"),
    "cuda/sm90/walks": (*BELOW, "cuda/chunked", "cuda/backward", "cuda/sm90/carry"),
    "cuda/sm90/fused": (*BELOW, "cuda/chunked", "cuda/sm90"),
}


def files(root: Path) -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [path for path in listed.splitlines() if SOURCES.fullmatch(path) and not LEFT_OUT.match(path)]


def includes(path: str, text: str) -> Iterator[str]:
    """Sentences about includes that the file's folder may not have."""
    folder = str(Path(path).parent).removeprefix("src/")
    allowed = MAY_INCLUDE.get(folder) if path.startswith("src/") else None
    if allowed is None:
        if path.startswith("src/cuda/"):
            yield f"{path}: MAY_INCLUDE in tools/check_tree.py must say what src/{folder} may include"
        return
    for included in re.findall(r'^#include "((?:core|cpu|cuda|reference)/[^"]+)"', text, re.MULTILINE):
        other = str(Path(included).parent)
        if other != folder and other not in allowed and included not in allowed:
            yield f"{path}: src/{folder} may not include {included}"


def imports(path: str, text: str) -> Iterator[str]:
    """Sentences about imports by which a copy of the package under another name would find this one."""
    if not (path.startswith("python/cula/") and path.endswith(".py")):
        return
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.partition(".")[0] == "cula" for name in names):
            yield f"{path}:{node.lineno}: the package must import itself by a relative name"


def architectures(path: str, text: str) -> Iterator[str]:
    """Sentences about code that tells 12.0 from 10.0: the build assembles the former from the PTX of the
    latter (cmake/CulaCuda.cmake), where __CUDA_ARCH__ is 1000."""
    if not path.startswith("src/cuda/"):
        return
    for number, line in enumerate(text.splitlines(), 1):
        for compared in re.findall(r"__CUDA_ARCH__ *[<>=!]+ *(\d+)", line):
            if int(compared) > 1000:
                yield f"{path}:{number}: compares __CUDA_ARCH__ with {compared}, at most 1000"


def prose(lines: list[str]) -> Iterator[int]:
    """Numbers of the lines of Markdown that are no code, in fences or indented, and no row of a table."""
    fenced, before = False, ""
    for number, line in enumerate(lines, 1):
        fence = line.lstrip().startswith("```")
        indented = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        if not fence and not fenced and not indented and not line.startswith("|"):
            yield number
        fenced, before = fenced != fence, line


def columns(path: str, lines: list[str]) -> Iterator[str]:
    """Sentences about lines that are too long."""
    of_prose = set(prose(lines)) if path.endswith(".md") else set()
    log = path.startswith("docs/log/")
    for number, line in enumerate(lines, 1):
        if number in of_prose and not log:
            most = MOST_PROSE_COLUMNS
        elif "http" in line or (log and line.startswith("|")):
            continue
        else:
            most = MOST_COLUMNS
        if len(line) > most:
            yield f"{path}:{number}: {len(line)} columns, at most {most}"


def problems(path: str, text: str) -> Iterator[str]:
    yield from includes(path, text)
    yield from imports(path, text)
    yield from architectures(path, text)
    markdown = path.endswith(".md")
    count = len(GENERATED.sub("", text).splitlines()) if markdown else text.count("\n")
    if count > MOST_LINES:
        yield f"{path}: {count} lines, at most {MOST_LINES}"
    # Generated blocks become empty lines, so that the numbers of the others stay.
    own = GENERATED.sub(lambda block: "\n" * block[0].count("\n"), text) if markdown else text
    yield from columns(path, own.splitlines())
    if path.startswith("docs/design/"):
        if count > MOST_DESIGN_LINES:
            yield f"{path}: {count} lines, at most {MOST_DESIGN_LINES}"
        drawn = "```" in text or re.search(r"(^    .*\n){5}", text, re.MULTILINE)
        if not drawn and not path.endswith("glossary.md"):
            yield f"{path}: has no drawing"


def read_for(path: Path, seen: set[str]) -> set[str]:
    """The files of src/cuda/ that a file includes, directly or not, as they are named in an include."""
    for included in re.findall(r'^#include "(cuda/[^"]+)"', path.read_text(), re.MULTILINE):
        if included not in seen:
            seen.add(included)
            read_for(ROOT / "src" / included, seen)
    return seen


def kernels(paths: list[str]) -> Iterator[str]:
    """Sentences about kernels that need too many files to be read. The vocabulary is left out: instructions,
    arithmetic on registers, launches and barriers, and what a call is on the device."""
    vocabulary = re.compile(r"cuda/(ptx|tile|pipe)/|cuda/(device_args|host_device|limits|rule)\.h$")
    for path in paths:
        if not (path.startswith("src/cuda/") and "__global__" in (ROOT / path).read_text()):
            continue
        own = path.removeprefix("src/")
        needed = {each for each in read_for(ROOT / path, {own}) if not vocabulary.match(each)}
        if len(needed) > MOST_FILES:
            yield f"{path}: needs {len(needed)} files to be read, at most {MOST_FILES}: {sorted(needed)}"


def main() -> None:
    paths = files(ROOT)
    found = [problem for path in paths for problem in problems(path, (ROOT / path).read_text())]
    found += kernels(paths)
    if found:
        sys.exit("check_tree:\n  " + "\n  ".join(found))
    print("tree: includes, kernels, lines and columns are as CONTRIBUTING.md says")


if __name__ == "__main__":
    main()
