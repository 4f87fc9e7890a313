# SPDX-License-Identifier: Apache-2.0
"""Retention (arXiv:2307.08621) under the names and conventions of `fla.ops.retention`.

A token shrinks the state of head h by 1 - 2^(-5 - h). The functions are differentiable as `cula.api` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _fla
from .simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"]


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.retention.chunk_retention`: a whole prompt; states `[N, H, K, V]`."""
    try:
        _fla.options("chunk_retention", kwargs, ("chunk_size",))
        _fla.chunk_size("chunk_retention", kwargs)
        return chunk_simple_gla(
            q, k, v, None, _decay(q), scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
        )
    except Exception as error:
        _fla.refuse_types(chunk_retention, locals(), error)
        raise


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.retention.fused_chunk_retention`: as `chunk_retention`, of which it is a schedule."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.retention.fused_recurrent_retention`: token after token."""
    try:
        return fused_recurrent_simple_gla(
            q,
            k,
            v,
            None,
            _decay(q),
            scale,
            initial_state,
            output_final_state,
            reverse,
            state_v_first,
            cu_seqlens,
            **kwargs,
        )
    except Exception as error:
        _fla.refuse_types(fused_recurrent_retention, locals(), error)
        raise


def _decay(q: Tensor) -> Tensor:
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return torch.log1p(-torch.exp2(-5 - heads))
