# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh installs no system package that it may not. apt-get is a fake that fails once it was
called."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).with_name("setup.sh")


def all_of(terminal: int) -> bytes:
    """What was written to a terminal whose other end is closed, which may come in several parts."""
    text = b""
    with contextlib.suppress(OSError):  # Linux says so at the end
        while part := os.read(terminal, 4096):
            text += part
    return text


def setup(tmp_path: Path, answer: str | None = None, **environment: str) -> tuple[int, str, str]:
    """The exit status, what was said, and what apt-get was called with, on a machine without a compiler."""
    calls = tmp_path / "calls"
    for name, body in {"apt-get": f'echo "$*" >>{calls}; exit 7', "id": "echo 0", "sudo": "exit 8"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    outer = {name: value for name, value in os.environ.items() if name not in ("CI", "CULA_INSTALL")}
    outer |= {"CXX": "/nowhere/g++", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment}
    ours, theirs = pty.openpty() if answer is not None else (None, subprocess.DEVNULL)
    said = subprocess.PIPE if answer is None else theirs
    process = subprocess.Popen(
        [SETUP, "build"], env=outer, stdin=theirs, stdout=subprocess.DEVNULL, stderr=said
    )
    if answer is None:
        text = process.communicate(timeout=60)[1].decode()
    else:
        os.write(ours, answer.encode())
        process.wait(timeout=60)
        os.close(theirs)
        text = all_of(ours).decode()
        os.close(ours)
    return process.returncode, text, calls.read_text() if calls.exists() else ""


@pytest.mark.parametrize("environment", [{"CULA_INSTALL": "yes"}, {"CI": "true"}], ids=["yes", "CI"])
def test_it_goes_on_by_itself(tmp_path, environment):
    status, _, calls = setup(tmp_path, **environment)
    assert (status, calls) == (7, "update -qq\n")


@pytest.mark.parametrize("environment", [{"CULA_INSTALL": "no"}, {"CULA_INSTALL": "no", "CI": "true"}])
def test_it_does_not_install_where_it_may_not(tmp_path, environment):
    status, text, calls = setup(tmp_path, **environment)
    assert (status, calls) == (1, "")
    assert "run apt-get install g++ first, or set CULA_INSTALL=yes" in text


def test_it_does_not_ask_where_nobody_answers(tmp_path):
    status, text, calls = setup(tmp_path, CULA_INSTALL="ask")
    assert (status, calls) == (1, "")
    assert "nobody can be asked here" in text


@pytest.mark.parametrize(("answer", "installs"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_it_asks(tmp_path, answer, installs):
    status, text, calls = setup(tmp_path, answer, CULA_INSTALL="ask")
    assert "install the system packages g++ with apt-get?" in text
    assert (status, bool(calls)) == ((7, True) if installs else (1, False))


def test_the_switch_has_three_positions(tmp_path):
    status, text, calls = setup(tmp_path, CULA_INSTALL="maybe")
    assert (status, calls) == (1, "")
    assert "CULA_INSTALL must be yes, no or ask, got maybe" in text
