# SPDX-License-Identifier: Apache-2.0
"""The built library: its file, what it was built from, and its operators.

Their namespace is chosen where the library is built (`CULA_NAMESPACE` of CMake), and the rest of the package
imports itself by relative names alone. So a copy of the package under another name, on a library with another
namespace, lives beside this one in a process. tools/hf_kernel.py makes such a copy, with a module of its own
in the place of this one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

_PACKAGE = sys.modules[__name__.rpartition(".")[0]]


def library() -> Path:
    """The file of the operators. An editable install has it apart from the sources, in the package's second
    folder."""
    folders = [Path(folder, "lib") for folder in _PACKAGE.__path__]
    for folder in reversed(folders):
        if (path := folder / "libcula_torch.so").exists():
            return path
    raise ImportError(
        f"cula is not built: there is no libcula_torch.so in {' or '.join(map(str, folders))}; install "
        "torch, then run `pip install .` or `make build` in its source tree"
    )


torch.ops.load_library(library())

# What cmake/CulaBuildInfo.cmake wrote beside the library; an empty string is what is not known.
INFO: dict[str, str] = json.loads(library().with_name("build_info.json").read_text())

NAMESPACE = INFO["namespace"]
ops: torch._ops._OpNamespace = getattr(torch.ops, NAMESPACE)
unchecked: torch._ops._OpNamespace = getattr(torch.ops, f"{NAMESPACE}_unchecked")
