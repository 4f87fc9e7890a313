# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention with one decay per head under the names and conventions of `fla.ops.simple_gla`.

The functions are differentiable as `cula.api` says, by g but not by g_gamma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _autograd, _fla, _ops, _passes
from ._passes import Outputs, dense

__all__ = ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.simple_gla.chunk_simple_gla`: a whole prompt.

    q, k `[B, T, H, K]`, v `[B, T, H, V]`; the log decay is g `[B, T, H]`, the constant g_gamma `[H]`, their
    sum, or zero. `chunk_size` among the kwargs, a power of 2, changes nothing here.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("chunk_simple_gla", kwargs, ("chunk_size",))
        _fla.chunk_size("chunk_simple_gla", kwargs)
        _fla.sequences(q, cu_seqlens, initial_state)
        return _run(
            _ops.prefill,
            q,
            k,
            v,
            g,
            g_gamma,
            scale,
            initial_state,
            output_final_state,
            state_v_first,
            cu_seqlens,
        )
    except Exception as error:
        _fla.refuse_types(chunk_simple_gla, locals(), error)
        raise


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.simple_gla.fused_chunk_simple_gla`: as `chunk_simple_gla`, of which it is a schedule."""
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.simple_gla.fused_recurrent_simple_gla`: token after token. q, k and v may differ in dtype; o
    has that of q."""
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("fused_recurrent_simple_gla", kwargs)
        _fla.forward_only(reverse, None)
        _fla.sequences(q, cu_seqlens, initial_state)
        dtype = q.dtype
        q, k, v = _fla.one_dtype(q, k, v)
        o, final_state = _run(
            _ops.decode,
            q,
            k,
            v,
            g,
            g_gamma,
            scale,
            initial_state,
            output_final_state,
            state_v_first,
            cu_seqlens,
        )
        return o.to(dtype), final_state
    except Exception as error:
        _fla.refuse_types(fused_recurrent_simple_gla, locals(), error)
        raise


def _run(
    op: _ops.Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    if isinstance(g_gamma, Tensor) and g_gamma.requires_grad and torch.is_grad_enabled():
        _autograd.refuse_untrained(op.name, ["g_gamma"])
    algorithm = "simple_gla" if g is not None else "linear" if g_gamma is None else "lightning"
    o, final_state, _ = _passes.forward(
        op, algorithm, q, k, v, g=g, decay=g_gamma, scale=scale, cu_seqlens=cu_seqlens,
        states=dense(initial_state, state_v_first), outputs=Outputs(None, output_final_state),
    )  # fmt: skip
    return o, final_state
