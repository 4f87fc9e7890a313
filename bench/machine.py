# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: the device, its copy bandwidth and matrix rate, and the sources that were
compiled."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
from types import ModuleType

from bench import ROOT
from cula.bench import measure

# The libraries that a GPU's suites measure beside ours (bench/peers.py): their name, and their
# distribution's.
PEERS = {
    "FlashKDA": "flash_kda",
    "FLA": "flash-linear-attention",
    "cuDNN frontend": "nvidia-cudnn-frontend",
    "FlashInfer": "flashinfer-python",
}


def file_safe(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def source_hash(*folders: str) -> str:
    """Of the folders' names and contents, so that a figure older than the kernels shows itself."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """CULA_COMMIT names it where the tree was copied without its history."""
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        found = ""
    return os.environ.get("CULA_COMMIT") or found or None


def peer_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name, distribution in PEERS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(device: ModuleType) -> dict:
    """The head of a result file; `device` is cula.bench.cpu or cula.bench.gpu."""
    return {
        **measure.describe(device),
        "commit": commit(),
        "peers": peer_versions(),
        "clock_mhz": device.clock_mhz(),  # before the suite; a reading after it joins it
    }
