#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""old_runtime.py GLIBC FOLDER: libraries to link against, so that the result runs with that glibc and later.

A linker binds every symbol to the newest version that the machine's libraries have, so what is built on a new
machine does not load on an old one. glibc and libstdc++ never drop a version, though. FOLDER gets libraries
of their names with their symbols, each in the newest version that the old runtime had, and without code; with
`-L FOLDER` the linker takes them for the machine's. Three things need care:

- Functions that moved from libpthread, libdl and librt into libc with glibc 2.34 come from those again.
- What libstdc++ got later is linked in from libstdc++.a, as the compilers of the manylinux images do.
- `__libc_single_threaded` (2.32), by which libstdc++ leaves out atomics, is linked in and says no.

Which libstdc++ goes with a glibc is what the policies of auditwheel say, which looks at the result
(tools/make_wheel.sh). Needs readelf, ar, and the compiler that builds (CC, CXX).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# glibc: what manylinux_<glibc> allows of libstdc++.
POLICIES = {
    "2.28": {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11"},
    "2.31": {"GLIBCXX": "3.4.28", "CXXABI": "1.3.12"},
    "2.34": {"GLIBCXX": "3.4.29", "CXXABI": "1.3.13"},
}
MOVED = 2, 34  # the glibc that put what was in these into libc
MOVED_FROM = ("libdl.so.2", "librt.so.1", "libpthread.so.0")
ROW = re.compile(r" *\d+: \w+ +\w+ (\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ([^@\s]+)@(@?)(\w+)_([\d.]+)$")


class Symbol(NamedTuple):
    """kind: FUNC, OBJECT, TLS ... as readelf says; newest: whether the linker would take this version."""

    kind: str
    name: str
    newest: bool
    family: str
    version: tuple[int, ...]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library: Path) -> list[Symbol]:
    rows = map(ROW.match, run("readelf", "--dyn-syms", "--wide", library).splitlines())
    return [Symbol(row[1], row[2], bool(row[3]), row[4], numbers(row[5])) for row in rows if row]


def home(name: str) -> str:
    """Where a function was that is in libc now."""
    if name.startswith("dl"):
        return "libdl.so.2"
    return "librt.so.1" if re.match(r"(shm|mq|aio|lio|timer)_", name) else "libpthread.so.0"


def old(found: Iterable[Symbol], limits: dict[str, tuple[int, ...]]) -> dict[str, Symbol]:
    """The newest version within the limits of every name that has one."""
    chosen: dict[str, Symbol] = {}
    for each in found:
        within = each.family in limits and each.version <= limits[each.family]
        if within and (each.name not in chosen or each.version > chosen[each.name].version):
            chosen[each.name] = each
    return chosen


def write_library(folder: Path, soname: str, chosen: Iterable[Symbol]) -> None:
    """A shared library that has these symbols, and nothing behind them."""
    sections, versions = {"TLS": '.section .tbss,"awT",@nobits', "OBJECT": ".data"}, set()
    types = {"TLS": "tls_object", "OBJECT": "object"}
    lines = []
    for number, each in enumerate(chosen):
        version = f"{each.family}_{'.'.join(map(str, each.version))}"
        versions.add(version)
        label = f"stub_{number}"
        lines += [
            sections.get(each.kind, ".text"),
            f".globl {label}\n.type {label}, @{types.get(each.kind, 'function')}\n{label}: .zero 1",
            f".symver {label}, {each.name}@@{version}",
        ]
    source, script = folder / f"{soname}.s", folder / f"{soname}.map"
    source.write_text("\n".join(lines) + "\n")
    script.write_text("stubs { local: stub_*; };\n" + "".join(f"{each} {{}};\n" for each in sorted(versions)))
    compiler = os.environ.get("CC", "cc")
    run(
        compiler, "-shared", "-nostdlib", "-Wl,-z,noexecstack", f"-Wl,-soname,{soname}",
        f"-Wl,--version-script={script}", source, "-o", folder / soname,
    )  # fmt: skip


def file_of(name: str) -> Path:
    """A file that the compiler links with."""
    path = Path(run(os.environ.get("CXX", "c++"), f"-print-file-name={name}").strip())
    if not path.is_absolute():
        sys.exit(f"old_runtime: the compiler has no {name}")
    return path.resolve()


def main(glibc: str, folder: Path) -> None:
    if glibc not in POLICIES:
        sys.exit(f"old_runtime: the glibc must be one of {', '.join(POLICIES)}, got {glibc}")
    limits = {"GLIBC": numbers(glibc)} | {name: numbers(each) for name, each in POLICIES[glibc].items()}
    folder.mkdir(parents=True, exist_ok=True)
    libraries: dict[str, list[Symbol]] = defaultdict(list)
    for soname in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        found = symbols(file_of(soname))
        newest = {each.name: each.version for each in found if each.newest}
        for name, each in old(found, limits).items():
            moved = soname == "libc.so.6" and newest.get(name) == MOVED > limits["GLIBC"]
            libraries[home(name) if moved else soname].append(each)
    for soname, chosen in libraries.items():
        write_library(folder, soname, chosen)
    source = folder / "single_threaded.c"
    source.write_text('char __libc_single_threaded __attribute__((visibility("hidden"))) = 0;\n')
    run(os.environ.get("CC", "cc"), "-fPIC", "-c", source, "-o", folder / "single_threaded.o")
    run("ar", "rcs", folder / "libsingle_threaded.a", folder / "single_threaded.o")

    moved = [str(folder / soname) for soname in libraries if soname in MOVED_FROM]
    # The dynamic loader, in which __tls_get_addr is.
    needed = run("readelf", "--dynamic", "--wide", file_of("libc.so.6"))
    loaders = [str(file_of(name)) for name in re.findall(r"\(NEEDED\).*\[(ld-linux[^]]*)\]", needed)]
    rest = f"{file_of('libc_nonshared.a')} {folder}/libsingle_threaded.a"
    (folder / "libc.so").write_text(
        f"GROUP ( {folder}/libc.so.6 {rest} AS_NEEDED ( {' '.join(moved + loaders)} ) )\n"
    )
    (folder / "libm.so").write_text(f"INPUT ( {folder}/libm.so.6 )\n")
    (folder / "libstdc++.so").write_text(f"INPUT ( {folder}/libstdc++.so.6 {file_of('libstdc++.a')} )\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
