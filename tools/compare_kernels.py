# SPDX-License-Identifier: Apache-2.0
"""compare_kernels.py dump LIBRARY > FILE, or compare BEFORE AFTER: whether a change left every kernel's
machine code alone.

A dump has a line for each function of each architecture: a digest of its machine code and of what a launch
reserves for it (registers, barriers, constant and shared memory), and its name. Functions are compared by
architecture and digest,
since names are what a move changes: `compare` prints those that only one dump has, and fails if there are
    any.

    python tools/compare_kernels.py dump python/cula/lib/libcula_torch.so > before.txt
    python tools/compare_kernels.py compare before.txt after.txt

`cuobjdump` is found on PATH, beside nvcc, or as CUOBJDUMP; pip has it as nvidia-cuda-cuobjdump.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

HEADER = struct.Struct(
    "<16sHHIQQQIHHHHHH"
)  # ELF64: .., e_shoff 6, .., e_shentsize 11, e_shnum 12, e_shstrndx 13
SECTION = struct.Struct(
    "<IIQQQQIIQQ"
)  # name, type, flags, address, offset, size, link, info, alignment, entry size
NO_BITS = 8  # a section that takes room and has no bytes


def cuobjdump() -> str:
    for name in (os.environ.get("CUOBJDUMP"), "cuobjdump", "/usr/local/cuda/bin/cuobjdump"):
        if name and (found := shutil.which(name)):
            return found
    sys.exit(
        "compare_kernels: cuobjdump is neither on PATH nor in CUOBJDUMP; nvidia-cuda-cuobjdump of pip has it"
    )


def sections(cubin: bytes) -> dict[str, tuple[int, int, int, bytes]]:
    """Flags, info, size and bytes of each section of an ELF file, by name."""
    fields = HEADER.unpack_from(cubin)
    begin, size, count, names = fields[6], fields[11], fields[12], fields[13]
    rows = [SECTION.unpack_from(cubin, begin + i * size) for i in range(count)]
    at = rows[names][4]
    found = {}
    for name, kind, flags, _, offset, length, _, info, _, _ in rows:
        start = at + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        found[text] = flags, info, length, b"" if kind == NO_BITS else cubin[offset : offset + length]
    return found


def functions(cubin: bytes) -> Iterator[tuple[str, str]]:
    """Digest and linker's name of each function."""
    found = sections(cubin)
    for section, (flags, info, _, code) in found.items():
        name = section.removeprefix(".text.")
        if name == section:
            continue
        # The high bits of flags and info say how many barriers and registers the function has.
        digest = hashlib.sha256(code + struct.pack("<QI", flags, info & 0xFF000000))
        for kind in (".nv.constant0.", ".nv.shared."):
            digest.update(struct.pack("<Q", found.get(kind + name, (0, 0, 0, b""))[2]))
        yield digest.hexdigest()[:24], name


def dump(library: Path) -> list[str]:
    lines = []
    with TemporaryDirectory() as folder:
        subprocess.run(
            [cuobjdump(), "-xelf", "all", library.resolve()], cwd=folder, check=True, capture_output=True
        )
        for path in Path(folder).iterdir():
            architecture = path.suffixes[-2].lstrip(".")
            lines += [f"{architecture} {digest} {name}" for digest, name in functions(path.read_bytes())]
    if not lines:
        sys.exit(f"compare_kernels: {library} has no machine code for a GPU")
    plain = subprocess.run(
        ["c++filt"], input="\n".join(lines), check=True, capture_output=True, text=True
    ).stdout
    return sorted(plain.splitlines())


def differences(before: list[str], after: list[str]) -> list[str]:
    """The functions that only one of two dumps has, as often as it has them more than the other."""
    known = [Counter(tuple(line.split(maxsplit=2)[:2]) for line in lines) for lines in (before, after)]
    problems = []
    for sign, lines, missing in (("-", before, known[0] - known[1]), ("+", after, known[1] - known[0])):
        for line in lines:
            architecture, digest, name = line.split(maxsplit=2)
            if missing[architecture, digest] > 0:
                missing[architecture, digest] -= 1
                problems.append(f"{sign} {architecture} {name}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("dump").add_argument("library", type=Path)
    both = verbs.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.verb == "dump":
        print("\n".join(dump(options.library)))
        return
    before, after = (path.read_text().splitlines() for path in (options.before, options.after))
    if problems := differences(before, after):
        sys.exit("compare_kernels: these differ:\n  " + "\n  ".join(problems))
    print(f"compare_kernels: the machine code of all {len(after)} functions is the same")


if __name__ == "__main__":
    main()
