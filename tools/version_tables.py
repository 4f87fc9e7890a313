# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/guide/versions.md, for tools/update_docs.py: from the pinned requirements, and from what
runs of the tests recorded in bench/results."""

from __future__ import annotations

import json
import re
from pathlib import Path

from run_tables import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

# Packages that a user of the library meets, by the file that pins them.
PINNED = {
    "requirements.txt": ("torch", "numpy"),
    "requirements-dev.txt": ("transformers",),
    "requirements-cuda.txt": ("nvidia-cuda-nvcc",),
}
TITLES = {"torch": "PyTorch", "numpy": "NumPy", "nvidia-cuda-nvcc": "nvcc, for the CUDA kernels"}

# The result files of tests, and what a run of each is.
RUNS = {
    "gpu_tests": "the tests, on CUDA tensors",
    "fla_tests": "FLA's own operator tests, on the drop-ins",
    "fla_registry": "FLA's own operator tests, through its dispatch",
    "sanitizer": "compute-sanitizer",
    "fuzz": "the fuzzer",
}


def pinned() -> list[str]:
    """What every change is tested with on CPUs, and built with."""
    rows = []
    for file, packages in PINNED.items():
        text = (ROOT / file).read_text()
        for package in packages:
            (version,) = re.findall(rf"^{package}==(\S+)", text, re.MULTILINE)
            rows.append([TITLES.get(package, package), version])
    return table(["package", "version"], rows)


def runs() -> list[str]:
    """The devices and versions of the recorded runs."""
    rows = []
    for name, what in RUNS.items():
        for path in sorted(RESULTS.glob(f"*/{name}.json")):
            found = json.loads(path.read_text())
            device = found["device"] + (f", driver {found['driver']}" if found.get("driver") else "")
            versions = [f"PyTorch {found['torch']}"]
            versions += [f"CUDA {found['cuda']}"] if found.get("cuda") else []
            versions += [f"FLA {found['fla']}"] if found.get("fla") else []
            versions += [f"compute-sanitizer {found['sanitizer']}"] if found.get("sanitizer") else []
            rows.append([what, device, ", ".join(versions)])
    return table(["run", "device", "versions"], rows)


def peers() -> list[str]:
    """The other libraries that the recorded measurements stand beside."""
    found: dict[str, set[str]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        beside = result.get("peers", {})
        if "transformers" in result:  # its models, with the adapter and without
            beside = {**beside, "transformers": result["transformers"]}
        for name, version in beside.items():
            found.setdefault(name, set()).add(version)
    return table(
        ["measured beside", "versions"], [[name, ", ".join(sorted(found[name]))] for name in sorted(found)]
    )
