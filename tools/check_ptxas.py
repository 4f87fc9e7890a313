# SPDX-License-Identifier: Apache-2.0
"""check_ptxas.py [BUILD] [--list]: what nvcc said of a build's CUDA kernels, held against
tools/ptxas_limits.txt.

A kernel fails that spills, keeps a stack frame, or takes more registers than its limit; so does a warp-group
matrix product that ptxas had to serialise, and any warning. --list prints all kernels and judges nothing.

cmake/nvcc_log.sh writes the logs that are read here, one beside each object.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = Path(__file__).with_name("ptxas_limits.txt")

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
FUNCTION = re.compile(r"Function properties for (?P<name>\w+)")
MEMORY = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
# C7510 and its relatives say "Potential Performance Loss: wgmma.mma_async instructions are serialized".
COMPLAINT = re.compile(r"\(C7\d+\).*|.*\bwarning\b.*")


@dataclass
class Function:
    """What ptxas reports: a kernel, or (registers 0) a device function that it did not inline."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spilled: int = 0  # bytes stored and loaded


@dataclass
class Limit:
    pattern: str
    arch: str
    registers: int
    stack: int = 0
    spilled: int = 0
    used: bool = False

    def matches(self, function: Function) -> bool:
        return fnmatchcase(function.name, self.pattern) and self.arch in ("*", function.arch)


def parse_log(text: str) -> tuple[list[Function], list[str]]:
    """The functions, named as the linker names them, and the complaints of a log."""
    functions: dict[tuple[str, str], Function] = {}
    complaints = []
    arch, entry, current = "", None, None
    for line in text.splitlines():
        if match := ENTRY.search(line):
            arch = match["arch"]
            entry = functions.setdefault((match["name"], arch), Function(match["name"], arch))
        elif match := FUNCTION.search(line):
            current = functions.setdefault((match["name"], arch), Function(match["name"], arch))
        elif (match := MEMORY.search(line)) and current:
            current.stack = int(match["stack"])
            current.spilled = int(match["stores"]) + int(match["loads"])
        elif (match := REGISTERS.search(line)) and entry:
            entry.registers = int(match["registers"])
        elif match := COMPLAINT.search(line):
            complaints.append(match[0])
    return list(functions.values()), complaints


def short_name(signature: str) -> str:
    """sm80::step<float,64,true> of `void cula::cuda::sm80::step<float, 64, true>(cula::cuda::DeviceArgs)`."""
    name = signature.replace("(anonymous namespace)::", "")
    if name.endswith(")"):
        depth, at = 0, len(name)
        while at == len(name) or depth:
            at -= 1
            depth += (name[at] == ")") - (name[at] == "(")
        name = name[:at]
    return name.removeprefix("void ").replace("cula::cuda::", "").replace(" ", "")


def parse_limits(text: str) -> list[Limit]:
    limits = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split(maxsplit=5)
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) not in (3, 6) or not all(field.isdigit() for field in fields[2:5]):
            raise ValueError(
                f"line {number}: want PATTERN ARCH REGISTERS, or these and STACK SPILLED REASON: {line}"
            )
        limits.append(Limit(fields[0], fields[1], *map(int, fields[2:5])))
    return limits


def judge(functions: list[Function], limits: list[Limit]) -> list[str]:
    """What is wrong. The first limit that matches a function holds."""
    problems = []
    for function in functions:
        where = f"{function.name} {function.arch}"
        limit = next((limit for limit in limits if limit.matches(function)), None)
        if limit:
            limit.used = True
        elif function.registers:
            problems.append(f"{where}: {function.registers} registers, and no limit stands for it")
        if limit and function.registers > limit.registers:
            problems.append(f"{where}: {function.registers} registers, limit {limit.registers}")
        if function.stack > (limit.stack if limit else 0) or function.spilled > (
            limit.spilled if limit else 0
        ):
            problems.append(f"{where}: {function.stack} bytes of stack, {function.spilled} bytes spilled")
    built = {"*", *(function.arch for function in functions)}
    problems += [
        f"{limit.pattern} {limit.arch}: a limit for no kernel"
        for limit in limits
        if not limit.used and limit.arch in built
    ]
    return problems


def read_build(build: Path) -> tuple[list[Function], list[str]]:
    objects = [
        Path(line) for listing in build.glob("instances/*.txt") for line in listing.read_text().splitlines()
    ]
    if not objects:
        sys.exit(f"check_ptxas: {build} was configured without CUDA kernels")
    logs = [build / f"{path}.log" for path in objects]
    if missing := [path for path in logs if not path.exists()]:
        sys.exit(f"check_ptxas: not built: {missing[0]}")
    functions, complaints = parse_log("\n".join(path.read_text() for path in logs))
    mangled = "\n".join(function.name for function in functions)
    plain = subprocess.run(["c++filt"], input=mangled, check=True, capture_output=True, text=True).stdout
    for function, name in zip(functions, plain.splitlines(), strict=True):
        function.name = short_name(name)
    return functions, complaints


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("build", type=Path, nargs="?", default=ROOT / "build")
    arguments.add_argument("--list", action="store_true")
    options = arguments.parse_args()
    functions, complaints = read_build(options.build)
    if options.list:
        for f in sorted(functions, key=lambda f: (f.name, int(f.arch.strip("sm_af")))):
            print(f"{f.registers:4} registers {f.stack:6} stack {f.spilled:6} spilled  {f.arch:7} {f.name}")
        return
    problems = judge(functions, parse_limits(LIMITS.read_text())) + complaints
    if problems:
        sys.exit("check_ptxas:\n  " + "\n  ".join(problems))
    kernels = [f for f in functions if f.registers]
    archs = sorted({f.arch for f in kernels})
    print(
        f"ptxas: {len(kernels)} kernels on {', '.join(archs)}, "
        f"at most {max(f.registers for f in kernels)} registers"
    )


if __name__ == "__main__":
    main()
