# SPDX-License-Identifier: Apache-2.0
"""A new update rule or decay stops the build in every seam (docs/design/adding.md). An enumerator is added to
a copy of the sources; the compilers have to name every place that does not know it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from cula_testing.cases import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("include", "src")
# Sources whose compilation reaches every seam of the host. Headers are compiled by themselves.
HOST = {
    "src/core/validate.cc": [],
    "src/reference/entry.cc": [],
    "src/cpu/entry.cc": [],
    "src/cpu/isa.cc": ["-DCULA_CPU_TARGET=portable"],
    "src/cuda/limits.h": ["-x", "c++"],
    "src/cuda/machines.h": ["-x", "c++"],
    "src/cuda/backward/three_walks_rule.h": ["-x", "c++"],
    "src/cuda/sm90/fused/rule.h": ["-x", "c++"],
}
# Instances, one of each kernel family.
INSTANCES = (
    "chunked/prepare_channel",
    "chunked/prepare_token",
    "sm80/prefill_channel",
    "sm80/prefill_token",
    "sm80/backward_channel",
    "sm80/backward_token",
    "sm90/prefill_channel",
    "sm90/backward_channel",
    "backward/gradient_channel",
    "backward/gradient_token",
    "recurrent/step",
    "recurrent/step_any",
    "recurrent/backward",
)
# Folders of kernels that do not depend on the rule.
WITHOUT_SEAMS = {"src/cuda/float8", "src/cuda/forks"}

pytestmark = pytest.mark.cpu_only("it compiles")
NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def sources(root: Path) -> Iterable[tuple[str, str]]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".cuh"):
                yield str(path.relative_to(root)), path.read_text()


def switches(root: Path, kind: str) -> set[tuple[str, int]]:
    """File and line of every switch over the enum."""
    return {
        (name, text.count("\n", 0, found.start()) + 1)
        for name, text in sources(root)
        for found in re.finditer(rf"switch \([^;{{]*\) {{\s*case {kind}::", text)
    }


def questions(root: Path) -> dict[str, str]:
    """Message and file of every seam of a kernel."""
    return {
        found[1]: name
        for name, text in sources(root)
        for found in re.finditer(r'static_assert\(\s*kIsKnown<kUpdate>,\s*"([^"]+)"\)', text)
        if name != "src/cuda/rule.h"
    }


def in_copy(folder: Path, kind: str) -> Path:
    """A copy of the sources with a rule, or a decay, that nothing knows."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    header = folder / "include/cula/algorithm.h"
    text = header.read_text()
    pair = {"Update": "{Decay::kNone, Update::kFake}", "Decay": "{Decay::kFake, Update::kDelta}"}[kind]
    for place, added in (
        (rf"enum class {kind} : std::uint8_t {{\n", "kFake,\n"),
        (rf"std::array k{kind}s{{", f"{kind}::kFake, "),
        (r"to_array<NamedAlgorithm>\({\n", f'{{"fake", {pair}, "fake"}},\n'),
    ):
        text, count = re.subn(place, lambda found, added=added: found[0] + added, text)
        assert count == 1, f"{place} is not in algorithm.h"
    header.write_text(text)
    return folder


def errors(command: list[str], folder: Path) -> str:
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert run.returncode != 0, f"{' '.join(command)} knows the rule"
    return run.stdout + run.stderr


@pytest.mark.parametrize("kind", ["Update", "Decay"])
def test_a_new_enumerator_stops_the_host(tmp_path, kind):
    copy = in_copy(tmp_path, kind)
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-fsyntax-only", "-Werror=switch", "-Isrc", "-Iinclude"]
    named = set()
    for source, more in HOST.items():
        found = errors([*compiler.split(), *flags, *more, source], copy)
        named |= {
            (os.path.relpath(copy / name, copy), int(line))
            for name, line in re.findall(r"^(\S+?):(\d+):.*error: .*kFake.*switch", found, re.MULTILINE)
        }
    expected = switches(copy, kind)
    assert len(expected) >= 5
    assert expected <= named, f"no compiler names {sorted(expected - named)}"


def instance_errors(instance: str, folder: Path) -> str:
    source = folder / "instance.cu"
    source.write_text(f'#include "cuda/{instance}_instance.cuh"\nCULA_INSTANTIATE(__half, 64)\n')
    return errors(
        ["nvcc", "-std=c++20", "-Isrc", "-Iinclude", "--expt-relaxed-constexpr", "-arch=sm_90a", "-c",
         source.name, "-o", "instance.o"], folder,
    )  # fmt: skip


@NEEDS_NVCC
def test_a_new_update_stops_every_kernel(tmp_path):
    copy = in_copy(tmp_path, "Update")
    found = "".join(instance_errors(instance, copy) for instance in INSTANCES)
    missing = [message for message in questions(copy) if message not in found]
    assert not missing, f"nvcc does not ask {missing}"
    assert "kFake" in found


@NEEDS_NVCC
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_decay_that_varies_like_another_stops_every_kernel(tmp_path, instance):
    """Kernels compare with the one decay that varies by token, and by channel (`only_decay`)."""
    copy = in_copy(tmp_path, "Decay")
    header, asked = copy / "include/cula/algorithm.h", ("varies_by_token", "varies_by_channel")
    text = header.read_text()
    for question in asked:
        place = rf"bool {question}\(Decay decay\) {{\n    switch \(decay\) {{\n"
        text, count = re.subn(place, lambda found: found[0] + "case Decay::kFake: return true;\n", text)
        assert count == 1, f"{question} is not in algorithm.h"
    header.write_text(text)
    found = instance_errors(instance, copy)
    for question in asked:
        assert f"only_decay({question})" in found
    assert "there are two such decays" in found


def test_every_folder_of_kernels_has_a_seam():
    kernels = {str(Path(name).parent) for name, text in sources(ROOT) if "__global__" in text}
    seams = {str(Path(name).parent) for name in questions(ROOT).values()}
    seams |= {str(Path(name).parent) for name, _ in switches(ROOT, "Update")}
    assert kernels - seams == WITHOUT_SEAMS


def test_rules_are_compared_in_no_other_place():
    """A comparison sends a rule that it does not know to one of its two branches."""
    bindings = ((str(path), path.read_text()) for path in (ROOT / "bindings").rglob("*.cc"))
    for name, text in (*sources(ROOT), *bindings):
        compared = re.search(
            r"[^\n]*([=!<>]=\s*(Update|Decay)::k|(Update|Decay)::k\w+\s*[=!<>]=)[^\n]*", text
        )
        assert not compared, f"{name}: {compared and compared[0].strip()}"


def test_the_algorithms_are_listed_once():
    """Python, tests, benchmark and tools take the names from the library: no table of their own has more
    than seven of them. (`__all__` has as many, which are modules of drop-ins.)"""
    for folder in ("python", "tests", "bench", "tools", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            for table in re.findall(r"[({\[][^(){}\[\]]*[)}\]]", path.read_text()):
                named = {name for name in ALGORITHMS if f'"{name}"' in table}
                assert len(named) <= 7, f"{path}: {table}"
