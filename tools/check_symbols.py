#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_symbols.py [LIBRARY]: libcula_torch.so loads with any Python and any PyTorch >= 2.10, with CUDA or
without.

It may need the C and C++ runtimes and libtorch_cpu, and no CUDA library: the CUDA runtime is linked in and
finds the driver itself. Of PyTorch it may use the stable C functions alone. It exports nothing and has no run
path.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "python" / "cula" / "lib" / "libcula_torch.so"

# Before glibc 2.34, threads, timers and dlopen were libraries of their own.
NEEDED = re.compile(
    r"(libtorch|libtorch_cpu|libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|librt|ld-linux-[\w-]+)"
    r"\.so(\.\d+)?"
)
STABLE = re.compile(r"(aoti_torch|torch)_\w+")
RUNTIME_VERSIONS = ("GLIBC_", "GLIBCXX_", "CXXABI_", "GCC_")
# What the compiler's start-up code refers to weakly.
START_UP = {"__gmon_start__", "_ITM_registerTMCloneTable", "_ITM_deregisterTMCloneTable"}


def run(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def problems(library: Path) -> list[str]:
    found = []
    for line in run("readelf", "--dynamic", "--wide", library):
        if match := re.search(r"\((NEEDED|RUNPATH|RPATH)\).*\[(.*)\]", line):
            tag, value = match.groups()
            if tag != "NEEDED":
                found.append(f"has a run path: {value}")
            elif not NEEDED.fullmatch(value):
                found.append(f"needs {value}")
    symbols = run("readelf", "--dyn-syms", "--wide", library)
    rows = [line.split() for line in symbols if re.match(r"\s*\d+:", line)]
    named = [(row[6], row[7]) for row in rows if len(row) >= 8]  # section, name@version
    if not any(name.startswith("aoti_torch_") for _, name in named):
        found.append("uses no function of PyTorch: is this the right library?")
    for section, name in named:
        plain, _, version = name.replace("@@", "@").partition("@")
        if section != "UND":
            found.append(f"exports {plain}")
        elif not (version.startswith(RUNTIME_VERSIONS) or plain in START_UP or STABLE.fullmatch(plain)):
            found.append(f"uses {plain}, which is not in the stable ABI")
    return found


def main(library: Path) -> None:
    found = problems(library)
    if found:
        sys.exit(f"check_symbols: {library.name}\n  " + "\n  ".join(found))
    print(f"symbols: {library.name} needs and shows what it should")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY)
