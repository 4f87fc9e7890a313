# SPDX-License-Identifier: Apache-2.0
"""Linear attention without decay under the names and conventions of `fla.ops.linear_attn`.

With `normalize` a token's result is divided by its query's product with the sum of the keys so far, z, plus
1e-10; states are then pairs of S `[N, H, K, V]` and z `[N, 1, H, K]`. z is a state as S is, of values that
are one, and so comes from the same kernels, in float32 (float64 where k is). As in FLA, it is returned in k's
dtype, or in the wider of k's and that of a z which was given, and so is o. The functions are differentiable
as `cula.api` says, z too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _fla, _ops, _passes
from .simple_gla import _run

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
    try:
        return _linear(_ops.prefill, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)
    except Exception as error:
        _fla.refuse_types(chunk_linear_attn, locals(), error)
        raise


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
    """`fla.ops.linear_attn.fused_recurrent_linear_attn`: token after token. q, k and v may differ in dtype; o
    has that of q, promoted with those of k and z where it is normalised."""
    try:
        _fla.forward_only(reverse, None)
        return _linear(_ops.decode, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)
    except Exception as error:
        _fla.refuse_types(fused_recurrent_linear_attn, locals(), error)
        raise


def _linear(
    op: _ops.Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, States]:
    if type(normalize) is not bool:
        _passes.check_flags(normalize=normalize)
    if normalize:
        _fla.no_grouped_heads(q, k, v)
    z = None
    if initial_state is not None and not isinstance(initial_state, Tensor):
        initial_state, z = _pair(initial_state, normalize)
    _fla.sequences(q, cu_seqlens, initial_state)
    o_dtype, z_dtype = q.dtype, k.dtype
    if op is _ops.decode:
        q, k, v = _fla.one_dtype(q, k, v)
    o, final_state = _run(
        op, q, k, v, None, None, scale, initial_state, output_final_state, False, cu_seqlens
    )
    o = o.to(o_dtype)
    if not normalize:
        return o, final_state
    wide = torch.promote_types(k.dtype, torch.float32)
    if z is not None:
        z_dtype = torch.promote_types(z_dtype, z.dtype)
        z = z.squeeze(1).unsqueeze(-1).to(wide)
    ones = q.new_ones((*q.shape[:3], 1), dtype=wide)
    sums, final_z = _run(op, q.to(wide), k.to(wide), ones, None, None, scale, z, True, False, cu_seqlens)
    assert final_z is not None  # it was asked for
    o_dtype = torch.promote_types(o_dtype, z_dtype)
    return (o / (sums + 1e-10)).to(o_dtype), (final_state, final_z.squeeze(-1).unsqueeze(1).to(z_dtype))


def _pair(given: object, normalize: bool) -> tuple[Tensor | None, Tensor | None]:
    """S and z of an initial state that is no tensor."""
    if not isinstance(given, tuple) or not normalize:
        wanted = (
            "a tensor, a pair of tensors or None" if normalize else "a tensor or None with normalize=False"
        )
        raise TypeError(f"initial_state must be {wanted}, got {_ops.type_name(given)}")
    if len(given) != 2:
        raise ValueError(f"initial_state must be a tensor or a pair (S, z), got {len(given)} values")
    for name, value, dims in (("S", given[0], "[N, H, K, V]"), ("z", given[1], "[N, 1, H, K]")):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"initial_state must be a pair of tensors, got {_ops.type_name(value)} as {name}")
        if not _ops.is_dense(value) or value.dim() != 4 or (name == "z" and value.shape[1] != 1):
            raise ValueError(f"initial_state must have {name} {dims}, got {_ops.described(value)}")
        if not value.is_floating_point() or value.element_size() == 1:
            raise ValueError(
                f"initial_state must have a floating-point dtype of 16 bits at least in {name}, "
                f"got {value.dtype}"
            )
    return given
