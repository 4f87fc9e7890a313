#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_hardening.py [LIBRARY] [COMPILE_COMMANDS]: libcula_torch.so is built and linked with what limits the
damage of a bug in memory: tables that are read-only once the library is loaded, no stack that is executable,
no code that the loader has to write to, canaries on the stack, and the C library's functions with the sizes
of what they write to.

The last leave no trace where a size is known or nothing calls such a function, so they are looked for in the
commands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "python" / "cula" / "lib" / "libcula_torch.so"
COMMANDS = ROOT / "build" / "compile_commands.json"
FLAGS = ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=3")


def readelf(option: str, library: Path) -> list[list[str]]:
    text = subprocess.run(
        ["readelf", "--wide", option, library], check=True, capture_output=True, text=True
    ).stdout
    return [line.split() for line in text.splitlines() if line.strip()]


def library_problems(library: Path) -> list[str]:
    segments = {row[0]: row for row in readelf("--segments", library)}
    dynamic = [" ".join(row) for row in readelf("--dynamic", library)]
    symbols = {row[7].partition("@")[0] for row in readelf("--dyn-syms", library) if len(row) > 7}
    found = []
    if "GNU_RELRO" not in segments:
        found.append("its tables stay writable: link with -z relro")
    if not any("(FLAGS_1)" in row and "NOW" in row for row in dynamic):
        found.append("functions are bound at their first call: link with -z now")
    stack = segments.get("GNU_STACK")
    if stack is None or "E" in "".join(stack[6:-1]):
        found.append("its stack is executable: link with -z noexecstack")
    if any("(TEXTREL)" in row or ("(FLAGS)" in row and "TEXTREL" in row) for row in dynamic):
        found.append("its code is written to when it is loaded: compile with -fPIC")
    if "__stack_chk_fail" not in symbols:
        found.append("no function has a canary: compile with -fstack-protector-strong")
    return found


def command_problems(commands: Path) -> list[str]:
    entries = json.loads(commands.read_text())
    sources = {entry["file"]: entry["command"].split() for entry in entries if entry["file"].endswith(".cc")}
    ours = {file: words for file, words in sources.items() if Path(file).is_relative_to(ROOT)}
    return [
        f"{Path(file).relative_to(ROOT)} is compiled without {flag}"
        for file, words in sorted(ours.items())
        for flag in FLAGS
        if flag not in words and Path(file).relative_to(ROOT).parts[0] in ("src", "bindings")
    ]


def main(library: Path = LIBRARY, commands: Path = COMMANDS) -> None:
    found = library_problems(library) + command_problems(commands)
    if found:
        sys.exit(f"check_hardening: {library.name}\n  " + "\n  ".join(found))
    print(f"hardening: {library.name} has what it should")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
