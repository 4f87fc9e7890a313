# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: the device, its copy bandwidth and matrix rate, and the sources that were compiled."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from bench import ROOT

UNKNOWN_CACHE_BYTES = 64 << 20
COPY_BYTES = 1 << 30
GEMM_SIZE = 4096


def device_name() -> str:
    """The CPU's model and its cores."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1] if model else os.uname().machine
    return f"{name}, {torch.get_num_threads()} threads"


def file_safe(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def last_level_cache_bytes() -> int:
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    known = [int(text[:-1]) * units[text[-1]] for text in (path.read_text().strip() for path in sizes)]
    return max(known, default=UNKNOWN_CACHE_BYTES)


def _seconds(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return median(samples)


def copy_tbps() -> float:
    """TB/s of a large copy, bytes read and bytes written both counted."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source)) / 1e12


def gemm_tflops() -> float:
    """TFLOP/s of a large bf16 matrix product."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16() for _ in range(2))
    return 2 * GEMM_SIZE**3 / _seconds(lambda: a @ b) / 1e12


def source_hash(folder: str) -> str:
    """Of a folder's names and contents, so that a figure older than the kernels shows itself."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit() -> str | None:
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None


def describe(sources: str) -> dict:
    """The head of a result file."""
    return {
        "device": device_name(),
        "driver": None,
        "torch": torch.__version__,
        "cuda": None,
        "commit": commit(),
        "source_hash": source_hash(sources),
        "copy_tbps": round(copy_tbps(), 4),
        "gemm_tflops": round(gemm_tflops(), 3),
    }
