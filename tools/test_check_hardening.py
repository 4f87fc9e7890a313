# SPDX-License-Identifier: Apache-2.0
"""The gate on what limits the damage of a bug in memory."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

import check_hardening as gate

COMPILER = shutil.which("g++")
HARD = ["-O2", "-fPIC", *gate.FLAGS, "-Wl,-z,relro,-z,now,-z,noexecstack"]
SOURCE = 'extern "C" void fill(char*); char first() { char line[64]; fill(line); return line[0]; }\n'


@pytest.mark.skipif(COMPILER is None, reason="no g++ to make libraries with")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], None),
        (["-Wl,-z,norelro"], "-z relro"),
        (["-Wl,-z,lazy"], "-z now"),
        (["-Wl,-z,execstack"], "-z noexecstack"),
        (["-fno-stack-protector"], "-fstack-protector-strong"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_is_missed(tmp_path, changes, words):
    (tmp_path / "one.cc").write_text(SOURCE)
    library = tmp_path / "one.so"
    subprocess.run([COMPILER, "-shared", *HARD, *changes, "-o", library, tmp_path / "one.cc"], check=True)
    found = gate.library_problems(library)
    assert len(found) == (words is not None), found
    assert words is None or words in found[0]


def test_sources_are_compiled_with_the_flags(tmp_path):
    source = str(gate.ROOT / "src" / "registry.cc")
    commands = tmp_path / "compile_commands.json"
    for flags, count in ((gate.FLAGS, 0), (gate.FLAGS[:1], 1), ((), 2)):
        commands.write_text(
            json.dumps([{"file": source, "command": " ".join(["g++", *flags, "-c", source])}])
        )
        assert len(gate.command_problems(commands)) == count
