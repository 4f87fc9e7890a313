# SPDX-License-Identifier: Apache-2.0
"""The gated RMSNorm that hybrid layers have behind linear attention, in the signatures of FLA.

On CPUs a kernel of this library computes it, forward and backward. On GPUs FLA does, where it is installed
and takes the call; what is left, and float64, is plain PyTorch. The mean is taken in float32, and so is
everything between it and the result.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import _layer_checks, _layers, _norm_gpu, _ops, _passes, _plain

__all__ = ["RMSNormGated", "rms_norm_gated"]

_SIGMOID = {"swish": False, "silu": False, "sigmoid": True}


def _check_activation(activation: str) -> None:
    if not isinstance(activation, str):
        raise TypeError(f"activation must be of type str, got {_ops.type_name(activation)}")
    if activation not in _SIGMOID:
        raise ValueError(f"activation must be swish, silu or sigmoid, got {activation!r}")


def rms_norm_gated(
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`n(x) * act(g)` with `n(x) = x / sqrt(mean(x^2) + eps) * weight + bias`, like x.

    x, g: `[.., N]` of one shape; without g it is an RMSNorm. weight, bias: `[N]`.
    activation: of the gate, "swish" (or "silu") or "sigmoid".
    residual: like x, is added to x first. prenorm: returns that sum too, in residual's dtype, float32 with
        residual_in_fp32.
    norm_before_gate: False computes `n(x * act(g))`, as Mamba-2 does. group_size: the mean is taken over so
        many channels each, which divide N.
    zero_centered: the weight is `1 + weight`, as in Gemma and Qwen3-Next.

    Names and defaults are FLA's (`fla.modules.fused_norm_gate.rms_norm_gated`). ValueError names an argument
    that does not fit.
    """
    optional = {"g": g, "weight": weight, "bias": bias, "residual": residual}
    _layer_checks.check_tensors({"x": x}, optional)
    _passes.check_flags(
        prenorm=prenorm, residual_in_fp32=residual_in_fp32, norm_before_gate=norm_before_gate,
        zero_centered=zero_centered,
    )  # fmt: skip
    if not isinstance(eps, float | int) or isinstance(eps, bool):
        raise TypeError(f"eps must be of type float, got {_ops.type_name(eps)}")
    if group_size is not None and (not isinstance(group_size, int) or isinstance(group_size, bool)):
        raise TypeError(f"group_size must be of type int, got {_ops.type_name(group_size)}")
    _check_activation(activation)
    _layer_checks.check_floats({"x": x, **optional})
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have shape [.., N], N from 1 on, got {list(x.shape)}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    for name, other in (("g", g), ("residual", residual)):
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {list(x.shape)}, got {list(other.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape [{x.shape[-1]}], got {list(other.shape)}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size must divide the {x.shape[-1]} channels, got {group_size}")
    total, carried = x, x.float() if prenorm and residual_in_fp32 else x
    if residual is not None:
        total = _plain.wide(x) + residual
        carried = total.to(residual.dtype)
    given = (
        total, g, weight, bias, eps, _SIGMOID[activation], norm_before_gate, group_size or 0, zero_centered,
    )  # fmt: skip
    made: Tensor | None = None
    if _layers.takes(total, g, weight, bias):
        made = _layers.norm(*given)
    elif x.is_cuda and not is_compiling():
        made = _norm_gpu.norm(*given)
    y = (_plain.norm(*given) if made is None else made).to(x.dtype)
    return (y, carried) if prenorm else y


class RMSNormGated(nn.Module):
    """`rms_norm_gated` with its weight, as FLA's `FusedRMSNormGated`, whose parameters it takes."""

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm_before_gate: bool = True,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        _check_activation(activation)
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.norm_before_gate, self.group_size = norm_before_gate, group_size
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm_gated(
            x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps,
            norm_before_gate=self.norm_before_gate, group_size=self.group_size,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}"
