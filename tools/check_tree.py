# SPDX-License-Identifier: Apache-2.0
"""check_tree.py: what CONTRIBUTING.md promises about the tree, as far as a program can see it.

Which folder of src/ may include which; no file above 600 lines; no line above 110 columns; pages of
docs/design of at most 150 lines, with a drawing. Generated and recorded files are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES, MOST_COLUMNS, MOST_DESIGN_LINES = 600, 110, 150

SOURCES = re.compile(
    r".*\.(h|cc|cuh|py|sh|cmake|yml|md)|.*CMakeLists\.txt|Makefile|\.ci/run|tools/ptxas_limits\.txt"
)
LEFT_OUT = re.compile(r"bench/results/|licenses/|docs/log/|CHANGELOG\.md")
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)

# Folder: the folders of src/ that it may include besides itself. Every folder of src/cuda/ is here; others
# that are not are free. Instructions and tile verbs know no kernel, no kernel knows another's folder, and no
# architecture another's.
CUDA = ("core", "cuda")  # the files of the folder itself: arguments, limits, the device
BELOW = (*CUDA, "cuda/ptx", "cuda/tile", "cuda/pipe")
MAY_INCLUDE = {
    "core": ("cuda/chunked/entry.h", "cuda/forks/entry.h"),
    "cpu": ("core",),
    "reference": ("core",),
    "cuda": ("core", "cuda/tile/divisor.h", "cuda/pipe"),
    "cuda/ptx": (),
    "cuda/tile": ("cuda", "cuda/ptx"),
    "cuda/pipe": ("cuda", "cuda/ptx"),
    "cuda/chunked": BELOW,
    "cuda/backward": (*BELOW, "cuda/chunked"),
    "cuda/recurrent": (*BELOW, "cuda/backward/gradients.h"),
    "cuda/forks": BELOW,
    "cuda/sm80": (*BELOW, "cuda/chunked", "cuda/backward"),
    "cuda/sm90": (
        *BELOW,
        "cuda/chunked",
        "cuda/backward",
        "cuda/sm90/carry",
        "cuda/sm90/fused",
        "cuda/sm90/walks",
    ),
    "cuda/sm90/carry": (*BELOW, "cuda/chunked", "cuda/sm90"),
    "cuda/sm90/walks": (*BELOW, "cuda/chunked", "cuda/backward", "cuda/sm90/carry"),
    "cuda/sm90/fused": (*BELOW, "cuda/chunked", "cuda/sm90", "cuda/sm90/carry/config.cuh"),
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


def problems(path: str, text: str) -> Iterator[str]:
    yield from includes(path, text)
    lines = GENERATED.sub("", text).splitlines() if path.endswith(".md") else text.splitlines()
    if len(lines) > MOST_LINES:
        yield f"{path}: {len(lines)} lines, at most {MOST_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_COLUMNS and "http" not in line:
            yield f"{path}:{number}: {len(line)} columns, at most {MOST_COLUMNS}"
    if path.startswith("docs/design/"):
        if len(lines) > MOST_DESIGN_LINES:
            yield f"{path}: {len(lines)} lines, at most {MOST_DESIGN_LINES}"
        drawn = "```" in text or re.search(r"(^    .*\n){5}", text, re.MULTILINE)
        if not drawn and not path.endswith("glossary.md"):
            yield f"{path}: has no drawing"


def main() -> None:
    found = [problem for path in files(ROOT) for problem in problems(path, (ROOT / path).read_text())]
    if found:
        sys.exit("check_tree:\n  " + "\n  ".join(found))
    print("tree: includes, lines and columns are as CONTRIBUTING.md says")


if __name__ == "__main__":
    main()
