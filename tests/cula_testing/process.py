# SPDX-License-Identifier: Apache-2.0
"""Python in a process of its own, with this one's import path."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(*arguments: str, cwd: str | None = None, **environment: str) -> str:
    """What it prints; it must succeed and write nothing to its error stream."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout
