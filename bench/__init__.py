# SPDX-License-Identifier: Apache-2.0
"""The benchmark: `python -m bench`. docs/benchmarks.md says how to run it and how to read it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The cases and the oracle are those of the tests; the package is this tree's unless another is on the path
# already.
sys.path.insert(0, str(ROOT / "tests"))
sys.path.append(str(ROOT / "python"))
