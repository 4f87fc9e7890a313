# SPDX-License-Identifier: Apache-2.0
"""DeltaNet under the names and conventions of `fla.ops.delta_rule`.

The functions are differentiable as `cula.api` says.
"""

from __future__ import annotations

from torch import Tensor

from . import _fla, _ops, _passes
from ._passes import Outputs, dense

__all__ = ["chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule"]


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.delta_rule.chunk_delta_rule`: a whole prompt.

    q, k `[B, T, H, K]`, v `[B, T, H, V]`, beta `[B, T, H]`, states `[N, H, K, V]`. `chunk_size` among the
    kwargs (16, 32 or 64) changes nothing here.
    """
    try:
        chunk_size = kwargs.pop("chunk_size", 64)
        _fla.options("chunk_delta_rule", kwargs)
        if chunk_size not in (16, 32, 64):
            raise ValueError(f"`chunk_size` must be 16, 32 or 64, got {chunk_size}.")
        _fla.require(
            q.dtype == k.dtype == v.dtype,
            "q, k, v must have one dtype, got {}, {}, {}.",
            q.dtype,
            k.dtype,
            v.dtype,
        )
        _fla.require(beta.dim() == 3, "beta must be of shape (batch size, seq len, num of head).")
        _fla.sequences(q, cu_seqlens, initial_state)
        o, final_state, _ = _passes.forward(
            _ops.prefill, "delta", q, k, v, beta=beta, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, states=dense(initial_state, False),
            outputs=Outputs(None, output_final_state),
        )  # fmt: skip
        return o, final_state
    except Exception as error:
        _fla.refuse_types(chunk_delta_rule, locals(), error)
        raise


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.delta_rule.fused_recurrent_delta_rule`: token after token.

    beta is `[B, T, H]` or `[B, T, H, V]`, one if None. q, k and v may differ in dtype; o has that of q.
    """
    try:
        _fla.sequences(q, cu_seqlens, initial_state)
        if beta is None:
            beta = v.new_ones(v.shape[:3])
        dtype = q.dtype
        q, k, v = _fla.one_dtype(q, k, v)
        o, final_state, _ = _passes.forward(
            _ops.decode, "delta", q, k, v, beta=beta, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, states=dense(initial_state, False),
            outputs=Outputs(None, output_final_state),
        )  # fmt: skip
        return o.to(dtype), final_state
    except Exception as error:
        _fla.refuse_types(fused_recurrent_delta_rule, locals(), error)
        raise


# Withdrawn from FLA, whose advice is to call this.
fused_chunk_delta_rule = chunk_delta_rule
