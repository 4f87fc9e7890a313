# SPDX-License-Identifier: Apache-2.0
"""The overloads `out` of `torch.ops.cula` with the options spelled out."""

from __future__ import annotations

import torch

import cula  # noqa: F401  (loads torch.ops.cula)
from cula import _ops

OPTIONS = tuple(line.partition("\t")[0] for line in torch.ops.cula.option_bits().splitlines())


def packed(named: dict) -> dict:
    """Arguments by name, with the options among them in `options`."""
    options = {name: value for name, value in named.items() if name in OPTIONS}
    rest = {name: value for name, value in named.items() if name not in options}
    return {**rest, "options": _ops.pack(**options)}


def call(pass_name: str, **named) -> object:
    return getattr(torch.ops.cula, pass_name).out(**packed(named))
