# SPDX-License-Identifier: Apache-2.0
"""Adapters that put these kernels behind other projects' own functions, so that no import has to change.

`cula.integrations.fla` is for flash-linear-attention, `cula.integrations.transformers` for the hybrid models
of transformers, `cula.integrations.vllm` and `cula.integrations.sglang` for vLLM and SGLang, which find them
themselves. An adapter is imported where it is first named.
"""

import importlib
from types import ModuleType

from ._on_import import when_imported

_ADAPTERS = ("fla", "sglang", "transformers", "vllm")

__all__ = ["fla", "on_import", "sglang", "transformers", "vllm"]  # the adapters come from __getattr__


def on_import(package: str) -> None:
    """Registers with a project as soon as it is imported, as `CULA_FLA=1` does for "fla" and
    `CULA_TRANSFORMERS=1` for "transformers"."""
    when_imported(package, lambda: importlib.import_module(f".{package}", __name__).register())


def __getattr__(name: str) -> ModuleType:
    if name not in _ADAPTERS:
        raise AttributeError(f"module 'cula.integrations' has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
