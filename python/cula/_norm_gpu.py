# SPDX-License-Identifier: Apache-2.0
"""The gated RMSNorm on GPUs, by FLA where it is installed and takes the call."""

from __future__ import annotations

from torch import Tensor

from . import _layers
from ._conv_gpu import library_function

# FLA holds a row in one block, of so many bytes at most.
ROW_BYTES = 65536


def norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    sigmoid: bool,
    norm_before_gate: bool,
    group_size: int,
    zero_centered: bool,
) -> Tensor | None:
    """None for a call that FLA does not take. A gate of another dtype would get its gradient in x's there,
    and a launch without rows is an error."""
    if gate is None or not norm_before_gate or group_size not in (0, x.shape[-1]):
        return None
    if x.dtype not in _layers.DTYPES or gate.dtype != x.dtype or not x.numel():
        return None
    if x.shape[-1] * x.element_size() > ROW_BYTES:
        return None
    fla = library_function("fla.modules.fused_norm_gate", "rms_norm_gated")
    if fla is None:
        return None
    if zero_centered and weight is not None:
        weight = weight.float() + 1
    y: Tensor = fla(x, gate, weight, bias, activation="sigmoid" if sigmoid else "swish", eps=eps)
    return y
