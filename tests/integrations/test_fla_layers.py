# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention itself on this library: the tests of fla_layers.py, in a process that has FLA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cula_testing import packages

TESTS = Path(__file__).with_name("fla_layers.py")


@pytest.mark.cpu_only("a GPU runs FLA's own tests on the drop-ins")
def test_all_of_them():
    environment = {**os.environ, "PYTHONPATH": packages.path_with_fla()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        command, cwd=TESTS.parents[2], env=environment, capture_output=True, text=True, check=False
    )
    # All passed: none failed, and none was skipped.
    assert re.search(r"^[0-9]+ passed(, [0-9]+ warnings?)? in ", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 0, done.stderr
