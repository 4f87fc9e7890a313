# SPDX-License-Identifier: Apache-2.0
"""In the place of the package's own `_library`: the operators that kernel-builder built, whose namespace it
makes anew for every build, and what is known of them."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from .._ops import add_op_namespace_prefix, ops
from ._source import SOURCE

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
unchecked: torch._ops._OpNamespace = getattr(torch.ops, f"{NAMESPACE}_unchecked")


def _info() -> dict[str, str]:
    """As cmake/CulaBuildInfo.cmake writes it. The Hub's metadata.json says for what the variant is."""
    backend = json.loads(Path(__file__).parents[1].joinpath("metadata.json").read_text())["backend"]
    return {
        **SOURCE,
        "namespace": NAMESPACE,
        "build_type": "Release",
        "processor": platform.machine(),
        "compiler": "kernel-builder's",
        "torch_headers": "",
        "cuda_compiler": "kernel-builder's" if backend["type"] == "cuda" else "",
        "cuda_architectures": " ".join(backend.get("archs") or ()),
        "without_cuda": "" if backend["type"] == "cuda" else f"it is the variant for {backend['type']}",
    }


INFO = _info()

__all__ = ["INFO", "NAMESPACE", "ops", "unchecked"]
