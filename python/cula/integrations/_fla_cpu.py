# SPDX-License-Identifier: Apache-2.0
"""The parts of FLA's layers around linear attention, for CPU tensors alone.

FLA computes them in Triton, which has no driver on a machine without an accelerator. Only there does
`cula.integrations.fla` put these in their place. Short convolutions and RMSNorms run on kernels of this
library; layer norms, rotary embeddings and the activations that FLA's models call are plain PyTorch. Names
and parameters are FLA's; sums are taken in float32, as FLA takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from .. import _plain, conv, norm

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "swish": silu,
    "silu": silu,
    "sigmoid": torch.sigmoid,
}


def _need_cpu(*given: object) -> None:
    for x in given:
        if isinstance(x, Tensor) and not x.is_cpu:
            raise NotImplementedError(
                f"plain PyTorch stands in for FLA's Triton on CPU tensors alone, this one is on {x.device}"
            )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Norms


def _rms_norm(
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    _need_cpu(x, g, weight, bias, residual)
    if activation not in ACTIVATIONS:
        raise NotImplementedError(f"activation must be swish, silu or sigmoid, got {activation!r}")
    if x.shape[-1] % num_groups:
        raise ValueError(f"num_groups must divide the channels, got {num_groups} for {x.shape[-1]}")
    return norm.rms_norm_gated(
        x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps,
        group_size=x.shape[-1] // num_groups,
    )  # fmt: skip


def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The normalized sum of x and residual, in float32, and the sum itself as FLA hands it on."""
    _need_cpu(x, weight, bias, residual)
    if x.shape[-1] % num_groups:
        raise ValueError(f"num_groups must divide the channels, got {num_groups} for {x.shape[-1]}")
    total = _wide(x)
    carried = total if residual_in_fp32 else x
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(f"residual must have x's shape {list(x.shape)}, got {list(residual.shape)}")
        total = total + residual
        carried = total.to(residual.dtype)
    y = total.unflatten(-1, (num_groups, -1))
    y = y - y.mean(-1, keepdim=True)
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias), carried


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    if is_rms_norm:
        return _rms_norm(x, None, weight, bias, "swish", residual, prenorm, residual_in_fp32, eps, num_groups)
    y, carried = _layer_norm(x, weight, bias, residual, eps, residual_in_fp32, num_groups)
    return (y.to(x.dtype), carried) if prenorm else y.to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    _need_cpu(g)
    if activation not in ACTIVATIONS:
        raise NotImplementedError(f"activation must be swish, silu or sigmoid, got {activation!r}")
    y, carried = _layer_norm(x, weight, bias, residual, eps, residual_in_fp32)
    y = (y * ACTIVATIONS[activation](_wide(g))).to(x.dtype)
    return (y, carried) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    return _rms_norm(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    _need_cpu(x)
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return y.to(x.dtype if output_dtype is None else output_dtype)


# Short convolutions: each channel over the last W tokens. States `[N, D, W]` are these tokens.


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    _need_cpu(x, weight, bias, residual, initial_state)
    if cp_context is not None:
        raise NotImplementedError("cp_context of a short convolution is not built in plain PyTorch")
    weight = _check_convolution(weight, activation)
    channels, width = weight.shape
    rows = x.reshape(*x.shape[:2], channels)
    # A residual joins before the result is rounded.
    y, final = conv.convolve_tokens(
        rows if residual is None else _wide(rows), weight, bias, initial_state, cu_seqlens, None,
        activation is not None, width if output_final_state else 0,
    )  # fmt: skip
    y = y.reshape(x.shape)
    if residual is not None:
        y = y + residual
    return y.to(x.dtype), None if final is None else final.to(x.dtype)


def _check_convolution(weight: Tensor | None, activation: str | None) -> Tensor:
    if weight is None:
        raise NotImplementedError("a short convolution without weight is not built in plain PyTorch")
    if activation not in (None, "swish", "silu"):
        raise NotImplementedError(f"activation must be swish, silu or None, got {activation!r}")
    return weight


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each row, `cache` updated in place."""
    _need_cpu(x, cache, residual, weight, bias)
    weight = _check_convolution(weight, activation)
    token = x.reshape(-1, 1, weight.shape[0])
    if residual is not None:
        token = _wide(token)
    silu = activation is not None
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        y, state = _plain.convolve(token, weight, bias, cache, None, None, silu, cache.shape[2])
        assert state is not None  # it was asked for
        cache.copy_(state.detach())
    else:
        y = conv.causal_conv1d_update(token.transpose(1, 2), cache, weight, bias, activation).transpose(1, 2)
    y = y.reshape(x.shape)
    return (y if residual is None else y + residual).to(x.dtype), cache


# Rotary embeddings


def rotary_embedding_fwdbwd(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Turns pairs of channels by the angles of their token's position; with `conjugate` back again. Tokens
    whose position is in no table are zero, or stay as they are with `inplace`."""
    _need_cpu(x, cos, sin)
    tokens = x.shape[1]
    position = torch.arange(tokens)
    if cu_seqlens is None:
        offsets = seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets.unsqueeze(1)
        position = (position + offsets).expand(x.shape[0], tokens)
    else:
        first = torch.repeat_interleave(cu_seqlens[:-1] - seqlen_offsets, cu_seqlens.diff())
        position = position[: len(first)] - first
        position = pad(position, (0, tokens - len(first)), value=-1).unsqueeze(0)
    known = ((position >= 0) & (position < len(cos)))[..., None, None]
    row = position.clamp(0, len(cos) - 1)
    c, s = _wide(cos)[row].unsqueeze(2), _wide(sin)[row].unsqueeze(2)
    if conjugate:
        s = -s
    half = cos.shape[1]
    turned = x[..., : 2 * half]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = first * c - second * s, first * s + second * c
    made = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    made = torch.where(known, made, turned if inplace else 0).to(x.dtype)
    if inplace:
        turned.copy_(made)
        return x
    return torch.cat([made, x[..., 2 * half :]], -1)


# Activations, whose derivatives FLA's autograd functions ask for


def swish_fwd(x: Tensor, output_contiguous: bool = False) -> Tensor:
    _need_cpu(x)
    return silu(_wide(x)).to(x.dtype)


def swish_bwd(x: Tensor, dy: Tensor, output_contiguous: bool = False) -> Tensor:
    _need_cpu(x, dy)
    return (_wide(dy) * _swish_slope(_wide(x))).to(x.dtype)


def _swish_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def swiglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    _need_cpu(x, y)
    return (silu(_wide(x)) * y).to(x.dtype)


def swiglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor, ...]:
    """The gradients by x and y, and with `use_weight` the result too."""
    _need_cpu(x, y, g)
    wide, upstream = _wide(x), _wide(g)
    dx = (upstream * y * _swish_slope(wide)).to(x.dtype)
    dy = (upstream * silu(wide)).to(y.dtype)
    return (dx, dy, swiglu_fwd(x, y)) if use_weight else (dx, dy)


# Where FLA has them, under the names that both 0.5 and 0.6 know.
_MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "layernorm": (group_norm, layer_norm, rms_norm),
    "fused_norm_gate": (layer_norm_gated, rms_norm_gated),
    "l2norm": (l2norm,),
    "convolution": (causal_conv1d, causal_conv1d_update),
    "rotary": (rotary_embedding_fwdbwd,),
    "activations": (swish_fwd, swish_bwd, swiglu_fwd, swiglu_fwdbwd),
}
# Those that run on kernels of this library, for the dtypes that these take.
KERNELS = ("causal_conv1d", "causal_conv1d_update", "rms_norm", "rms_norm_gated")
FUNCTIONS = {
    (f"fla.modules.{module}", function.__name__): function
    for module, functions in _MODULES.items()
    for function in functions
}
