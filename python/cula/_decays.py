# SPDX-License-Identifier: Apache-2.0
"""What Level 1 makes of the decays that it is given: a cell of the family, and what the operators take."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _ops
from ._family import MODES


def algorithm_of(mode: str, g: Tensor | None, decay: Tensor | None) -> str:
    """The cell of the family: those of `simple_gla`, `delta` and `gdp` are told apart by the decay they are
    given."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "simple_gla" and g is None:
        return "linear" if decay is None else "lightning"
    if mode == "delta" and decay is not None:
        return "delta_per_head"
    if mode == "gdp" and g is None:
        return "delta_product"
    return mode


def decay_of(
    mode: str, q: Tensor, g: Tensor | None, dt_bias: Tensor | None, decay: Tensor | None
) -> tuple[str, Tensor | None, Tensor | None, Tensor | None]:
    algorithm = algorithm_of(mode, g, decay)
    if algorithm == "kda":
        algorithm, g, dt_bias = kda_decay(q, g, dt_bias)
    return algorithm, g, dt_bias, log_decay(decay)


def kda_decay(
    q: Tensor, g: Tensor | None, dt_bias: Tensor | None
) -> tuple[str, Tensor | None, Tensor | None]:
    """A gate `[B, T, HV]` is the same for all channels, which makes KDA the gated delta rule: nothing needs
    to be expanded, unless a bias per channel is still to be added."""
    if (
        not isinstance(g, Tensor)
        or g.dim() != 3
        or not isinstance(q, Tensor)
        or q.dim() != 4
        or not _ops.is_dense(g)
    ):
        return "kda", g, dt_bias
    if dt_bias is None or not _ops.is_dense(dt_bias) or dt_bias.numel() == g.shape[-1]:
        return "gdn", g, dt_bias
    return "kda", g.unsqueeze(-1).expand(*g.shape, q.shape[-1]).contiguous(), dt_bias


def log_decay(decay: Tensor | None) -> Tensor | None:
    if decay is None or not _ops.is_dense(decay):
        return decay  # absent, or refused with the other types
    return floating("decay", decay).copysign(-1.0)  # -abs(decay) in one kernel


def floating(argument: str, decay: Tensor) -> Tensor:
    """A decay per head that can take a sign: integers as float32, since a uint8 has no negative."""
    if decay.is_floating_point():
        return decay
    if decay.is_complex() or decay.dtype == torch.bool:
        raise ValueError(f"{argument} must have a floating or an integer dtype, got {decay.dtype}")
    return decay.to(torch.float32)


def check_gate(A_log: Tensor | None, lower_bound: float | None, safe_gate: bool = False) -> None:
    if lower_bound is not None and (
        isinstance(lower_bound, bool) or not isinstance(lower_bound, float | int)
    ):
        raise TypeError(f"lower_bound must be of type float, got {_ops.type_name(lower_bound)}")
    if A_log is None and lower_bound is None:
        raise ValueError(
            "A_log must be given when use_gate_in_kernel is True and lower_bound is not set, got None"
        )
    if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound must lie in [-5, 0) when safe_gate is True, got {lower_bound}")
