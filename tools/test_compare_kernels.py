# SPDX-License-Identifier: Apache-2.0
"""Whether a comparison of dumps sees what differs, and reads ELF files as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import compare_kernels

BEFORE = [
    "sm_80 aa void old::carry<float>(int)",
    "sm_80 aa void old::carry<half>(int)",
    "sm_90 bb void old::step(int)",
]


def test_names_do_not_count():
    after = [line.replace("old::", "fresh::") for line in reversed(BEFORE)]
    assert compare_kernels.differences(BEFORE, after) == []


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (BEFORE[:2], ["- sm_90 void old::step(int)"]),
        (BEFORE[1:], ["- sm_80 void old::carry<float>(int)"]),
        ([*BEFORE, "sm_90 bb void more(int)"], ["+ sm_90 void old::step(int)"]),
        (
            [*BEFORE[:2], "sm_90 cc void old::step(int)"],
            ["- sm_90 void old::step(int)", "+ sm_90 void old::step(int)"],
        ),
        (
            [*BEFORE[:2], "sm_80 bb void old::step(int)"],
            ["- sm_90 void old::step(int)", "+ sm_80 void old::step(int)"],
        ),
    ],
)
def test_what_only_one_has_is_found(after, found):
    assert compare_kernels.differences(BEFORE, after) == found


def test_sections_are_those_of_readelf():
    program = Path(sys.executable).resolve()
    text = subprocess.run(["readelf", "-SW", program], check=True, capture_output=True, text=True).stdout
    sizes = {name: int(size, 16) for name, size in re.findall(r"\] (\.\S+) +\w+ +\w+ \w+ (\w+)", text)}
    found = compare_kernels.sections(program.read_bytes())
    assert {name: size for name, (_, _, size, _) in found.items() if name} == sizes
    assert len(found[".text"][3]) == sizes[".text"] > 0
    assert found[".bss"][3] == b""


def test_code_and_registers_make_the_digest():
    code = {".text.kernel": (6, 0x20000000, 4, b"code"), ".nv.constant0.kernel": (2, 0, 64, b"")}

    def digests(**changes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare_kernels, "sections", lambda _: {**code, **changes})
            return list(compare_kernels.functions(b""))

    same = digests()
    assert [name for _, name in same] == ["kernel"]
    assert digests(**{".debug": (0, 0, 4, b"file")}) == same
    for changed in (
        {".text.kernel": (6, 0x20000000, 4, b"Code")},
        {".text.kernel": (6, 0x28000000, 4, b"code")},
        {".nv.constant0.kernel": (2, 0, 68, b"")},
        {".nv.shared.kernel": (3, 0, 16, b"")},
    ):
        assert digests(**changed) != same
