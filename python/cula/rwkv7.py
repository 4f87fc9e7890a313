# SPDX-License-Identifier: Apache-2.0
"""RWKV-7 under the names and conventions of FLA (`fla.ops.rwkv7`): r is the query and w the log decay. The
functions are differentiable as `cula.api` says."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _fla
from . import generalized_delta_rule as _dplr

__all__ = ["chunk_rwkv7", "fused_mul_recurrent_rwkv7", "fused_recurrent_rwkv7"]

# What the operators' arguments are called here.
_NAMES = {"q": "r", "g": "w", "a_key": "a", "b_key": "b"}


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.rwkv7.chunk_rwkv7`: a whole prompt.

    r, w, k, a, b `[B, T, H, K]`, v `[B, T, H, V]`. Everything else as in
    `cula.generalized_delta_rule.chunk_dplr_delta_rule`, but `scale`, which is 1 if left out.
    """
    try:
        return _dplr.chunk(
            "chunk_rwkv7", "r", "w", r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens,
            safe_gate, chunk_size, disable_recompute, cp_context, lower_bound,
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(chunk_rwkv7, locals(), error, names=_NAMES)
        raise


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.rwkv7.fused_recurrent_rwkv7`: token after token, made for a few tokens per sequence. `scale`
    is `K ** -0.5` if None, and the final state is returned unless it is refused."""
    try:
        return _dplr.recurrent(
            "r", "w", r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(fused_recurrent_rwkv7, locals(), error, names=_NAMES)
        raise


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.rwkv7.fused_mul_recurrent_rwkv7`: the same of a layer's kk, the normalised key, and a, the
    share of it that each channel is rewritten by: `-kk` reads, and `kk * a` is written along. `reverse` is
    refused."""
    try:
        _fla.forward_only(reverse, None)
        _dplr.check_keys("r", r, {"kk": kk, "a": a})
        b = kk.to(torch.promote_types(kk.dtype, torch.float32)) * a
        return _dplr.recurrent(
            "r", "w", r, w, k, v, -kk, b, scale, initial_state, output_final_state, cu_seqlens
        )
    except Exception as error:
        _fla.refuse_types(
            fused_mul_recurrent_rwkv7, locals(), error, names={**_NAMES, "a_key": "kk", "b_key": "a"}
        )
        raise
