# SPDX-License-Identifier: Apache-2.0
"""Linear attention without decay under the names and conventions of `fla.ops.linear_attn`.

With `normalize` a token's result is divided by its query's product with the sum of the keys so far, z, plus 1e-10;
states are then pairs of S `[N, H, K, V]` and z `[N, 1, H, K]`. z is a state as S is, of values that are one, and so
comes from the same kernels, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula import _fla, _ops
from cula.simple_gla import _run

__all__ = ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]

States = Tensor | tuple[Tensor | None, Tensor] | None


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """`fla.ops.linear_attn.chunk_linear_attn`: a whole prompt.

    q, k `[B, T, H, K]`, v `[B, T, H, V]`. As in FLA, z is returned with `normalize` whether or not
    `output_final_state` asks for S.
    """
    return _linear(_ops.prefill, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """`fla.ops.linear_attn.fused_chunk_linear_attn`: as `chunk_linear_attn`, of which it is a schedule."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """`fla.ops.linear_attn.fused_recurrent_linear_attn`: token after token."""
    _fla.forward_only(reverse, None)
    return _linear(_ops.decode, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def _linear(
    op: torch._ops.OpOverloadPacket,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, States]:
    z = None
    if normalize and isinstance(initial_state, tuple):
        initial_state, z = initial_state
    _fla.sequences(q, cu_seqlens, initial_state)
    o, final_state = _run(op, q, k, v, None, None, scale, initial_state, output_final_state, False, cu_seqlens)
    if not normalize:
        return o, final_state
    if z is not None:
        z = z.squeeze(1).unsqueeze(-1).to(torch.float32)
    ones = q.new_ones((*q.shape[:3], 1), dtype=torch.float32)
    sums, z = _run(op, q.float(), k.float(), ones, None, None, scale, z, True, False, cu_seqlens)
    return (o / (sums + 1e-10)).to(o.dtype), (final_state, z.squeeze(-1).unsqueeze(1).to(k.dtype))
