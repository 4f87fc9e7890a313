# SPDX-License-Identifier: Apache-2.0
"""What is linked against old_runtime.py's libraries needs no newer runtime, and runs here."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import old_runtime

SCRIPT = Path(old_runtime.__file__)
CXX = os.environ.get("CXX", "g++")

# Of each kind that care is taken of: a function with a newer version (pow), one that has moved
# (pthread_create in std::thread), what libstdc++ got later (from_chars, str() of an rvalue), its atomics, and
# an exception.
PROGRAM = r"""
#include <charconv>
#include <cmath>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

extern "C" double run(const char* text, double exponent) {
    const std::string given = text;
    double value = 0, made = 0;
    std::from_chars(given.data(), given.data() + given.size(), value);
    const auto shared = std::make_shared<double>(exponent);
    std::thread([&, shared] { made = std::pow(value, *shared); }).join();
    std::ostringstream stream;
    stream << made;
    try {
        throw std::runtime_error(std::move(stream).str());
    } catch (const std::exception& error) {
        return std::stod(error.what());
    }
}
"""


def needed(library: Path) -> list[tuple[str, tuple[int, ...]]]:
    text = subprocess.run(["readelf", "-V", "-W", library], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Name: ([A-Z]+)_([\d.]+)", text)
    return [(family, old_runtime.numbers(version)) for family, version in found]


@pytest.mark.parametrize(
    ("compiler", "glibc"), [(CXX, "2.28"), (CXX, "2.31"), ("aarch64-linux-gnu-g++", "2.28")]
)
def test_a_library_keeps_within_the_old_runtime(tmp_path, compiler, glibc):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    runtime, source, library = tmp_path / "runtime", tmp_path / "program.cc", tmp_path / "program.so"
    environment = {**os.environ, "CC": compiler, "CXX": compiler}
    subprocess.run([sys.executable, SCRIPT, glibc, runtime], check=True, env=environment)
    source.write_text(PROGRAM)
    build = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", source]
    subprocess.run([*build, "-Wl,--no-undefined", f"-L{runtime}", "-o", library], check=True)
    limits = {"GLIBC": glibc, **old_runtime.POLICIES[glibc]}
    for family, version in needed(library):
        assert version <= old_runtime.numbers(limits.get(family, "99")), f"{family} {version}"
    subprocess.run([*build, "-o", tmp_path / "new.so"], check=True)
    assert needed(library) != needed(tmp_path / "new.so")  # this machine is newer, so the test can fail
    if compiler != CXX:
        return  # it does not run here
    run = ctypes.CDLL(str(library)).run
    run.argtypes, run.restype = [ctypes.c_char_p, ctypes.c_double], ctypes.c_double
    assert run(b"2.5", 2.0) == 6.25


def test_another_glibc_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"must be one of 2\.28, 2\.31, 2\.34, got 2\.29"):
        old_runtime.main("2.29", tmp_path / "runtime")
    assert not (tmp_path / "runtime").exists()


def test_the_newest_version_within_the_limits_is_taken():
    def symbol(*version: int, newest: bool = False) -> old_runtime.Symbol:
        return old_runtime.Symbol("FUNC", "memcpy", newest, "GLIBC", version)

    found = [symbol(2, 34, newest=True), symbol(2, 2, 5), symbol(2, 14)]
    assert old_runtime.old(found, {"GLIBC": (2, 28)}) == {"memcpy": symbol(2, 14)}
    assert old_runtime.old(found, {"GLIBC": (2, 1)}) == {}
