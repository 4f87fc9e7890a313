# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention under the names and conventions of `fla.ops.gla`.

The functions are differentiable as `cula.api` says.
"""

from __future__ import annotations

from torch import Tensor

from . import _fla, _ops, _passes
from ._passes import Outputs, dense

__all__ = ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"]


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gla.chunk_gla`: a whole prompt.

    q, k and the log decay g `[B, T, H, K]`, v `[B, T, H, V]`, states float32 `[N, H, K, V]`.
    """
    try:
        _fla.sequences(q, cu_seqlens, initial_state)
        _fla.float32_state(initial_state)
        _fla.require(q.shape == k.shape == g.shape, "q, k, g must have the same shape.")
        _fla.no_grouped_heads(q, k, v)
        o, final_state, _ = _passes.forward(
            _ops.prefill, "gla", q, k, v, g=g, scale=scale, cu_seqlens=cu_seqlens,
            states=dense(initial_state, state_v_first), outputs=Outputs(None, output_final_state),
        )  # fmt: skip
        return o, final_state
    except Exception as error:
        _fla.refuse_types(chunk_gla, locals(), error)
        raise


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gla.fused_recurrent_gla`: token after token, with a decay gk `[B, T, H, K]` or none. q, k and
    v may differ in dtype; o has that of q."""
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("fused_recurrent_gla", kwargs)
        _fla.forward_only(reverse, gv)
        _fla.sequences(q, cu_seqlens, initial_state)
        dtype = q.dtype
        q, k, v = _fla.one_dtype(q, k, v)
        o, final_state, _ = _passes.forward(
            _ops.decode, "linear" if gk is None else "gla", q, k, v, g=gk, scale=scale, cu_seqlens=cu_seqlens,
            states=dense(initial_state, state_v_first), outputs=Outputs(None, output_final_state),
        )  # fmt: skip
        return o.to(dtype), final_state
    except Exception as error:
        _fla.refuse_types(fused_recurrent_gla, locals(), error, names={"g": "gk"})
        raise


# Withdrawn from FLA, whose advice is to call this.
fused_chunk_gla = chunk_gla
