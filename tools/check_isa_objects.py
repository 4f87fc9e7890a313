#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Objects built per instruction set must share no code with the rest of the library.

A function that several objects define (an inline function of another namespace, a standard container) is kept
once by the linker. If the copy kept was built with AVX-512, every CPU without it dies on a path that never
asked for it.

    check_isa_objects.py BUILD_DIR
"""

import re
import subprocess
import sys
from pathlib import Path

SHARED = re.compile(r"^[0-9a-f]* *[VWu] (.*)$")


def shared_symbols(path: Path, target: str) -> list[str]:
    listing = subprocess.run(["nm", "-C", str(path)], check=True, capture_output=True, text=True).stdout
    found = [match.group(1) for match in map(SHARED.match, listing.splitlines()) if match]
    return [name for name in found if f"cula::cpu::{target}::" not in name]


def main() -> int:
    objects = sorted(Path(sys.argv[1]).glob("**/cula_cpu_*.dir/**/isa.cc.o"))
    if not objects:
        print(f"check_isa_objects: no isa.cc.o below {sys.argv[1]}")
        return 1
    failed = False
    for path in objects:
        target = re.search(r"cula_cpu_(\w+)\.dir", str(path)).group(1)
        for name in shared_symbols(path, target):
            failed = True
            print(f"{target}: {name} may be linked into code for other CPUs")
    if not failed:
        print(f"check_isa_objects: {len(objects)} objects, nothing shared")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
