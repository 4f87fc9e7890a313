# SPDX-License-Identifier: Apache-2.0
"""Transitions that are a diagonal plus a matrix of rank one (DPLR), under the names and conventions of FLA
(`fla.ops.generalized_delta_rule`): a reads the state before it decays, b is what it has read written along.
Both functions are differentiable as `cula.api` says; FLA's recurrent one is not."""

from __future__ import annotations

from torch import Tensor

from . import _fla, _ops, _passes
from ._passes import LOG_DECAY, Outputs, dense

__all__ = ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"]

# What the operators' arguments are called here.
_NAMES = {"g": "gk", "a_key": "a", "b_key": "b"}


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object | None = None,
    lower_bound: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.generalized_delta_rule.chunk_dplr_delta_rule`: a whole prompt.

    q, k, a, b, gk `[B, T, H, K]`, v `[B, T, H, V]`; gk is the log decay, of any size. States are
    `[N, H, K, V]`, the final one float32. `safe_gate`, `lower_bound` and `chunk_size` say what FLA's kernels
    may rely on and change nothing here, nor does `cu_seqlens_cpu`; `disable_recompute` is that of
    `cula.api`. Tokens of no sequence give zeros. With `cp_context` the tokens are the rank's, as in
    `cula.dist.cula_rwkv7_cp`. Errors are FLA's.
    """
    try:
        _fla.options("chunk_dplr_delta_rule", kwargs)
        return chunk(
            "chunk_dplr_delta_rule", "q", "gk", q, gk, k, v, a, b, scale, initial_state, output_final_state,
            cu_seqlens, safe_gate, chunk_size, disable_recompute, cp_context, lower_bound,
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(chunk_dplr_delta_rule, locals(), error, names=_NAMES)
        raise


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule`: token after token, made for a few
    tokens per sequence. As `chunk_dplr_delta_rule`; q, k and v may differ in dtype; o has v's. `reverse` is
    refused."""
    try:
        _fla.forward_only(reverse, None)
        return recurrent(
            "q", "gk", q, gk, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(fused_recurrent_dplr_delta_rule, locals(), error, names=_NAMES)
        raise


def chunk(
    name: str,
    query: str,
    gate: str,
    q: Tensor,
    g: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    safe_gate: bool,
    chunk_size: int | None,
    disable_recompute: bool,
    cp_context: object | None,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor | None]:
    """The function `name`, which calls q and g as `query` and `gate` say."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"`lower_bound` must be negative ({gate} is a log-decay < 0), got {lower_bound}.")
    _passes.check_flags(safe_gate=safe_gate, disable_recompute=disable_recompute)
    if chunk_size is not None:
        _fla.check_sizes(name, chunk_size=chunk_size)
    if cp_context is not None:
        cu_seqlens = _fla.cu_seqlens_of(cp_context, initial_state, output_final_state)
    _fla.sequences(q, cu_seqlens, initial_state)
    check_shapes(query, gate, q, g, k, v, a, b)
    if cp_context is not None:
        return _fla.along(
            name, "rwkv7", cp_context, q, k, v, g, None, LOG_DECAY, scale, False, False, False, a_key=a,
            b_key=b,
        )  # fmt: skip
    o, final_state, _ = _passes.forward(
        _ops.prefill, "rwkv7", q, k, v, g, scale=scale, cu_seqlens=cu_seqlens,
        states=dense(initial_state, False), outputs=Outputs(None, output_final_state),
        disable_recompute=disable_recompute, a_key=a, b_key=b,
    )  # fmt: skip
    return o, final_state


def recurrent(
    query: str,
    gate: str,
    q: Tensor,
    g: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrent functions, which call q and g as `query` and `gate` say."""
    _fla.sequences(q, cu_seqlens, initial_state)
    check_shapes(query, gate, q, g, k, v, a, b)
    dtype = v.dtype
    q, k, v = _fla.one_dtype(q, k, v)
    o, final_state, _ = _passes.forward(
        _ops.decode, "rwkv7", q, k, v, g, scale=scale, cu_seqlens=cu_seqlens,
        states=dense(initial_state, False), outputs=Outputs(None, output_final_state), a_key=a, b_key=b,
    )  # fmt: skip
    return o if q.dtype == dtype else o.to(dtype), final_state


def check_shapes(
    query: str, gate: str, q: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> None:
    check_keys(query, q, {gate: g, "k": k, "a": a, "b": b})
    wanted = (*q.shape[:3], v.shape[-1])
    _fla.require(v.shape == wanted, "v must have shape [B, T, H, V], {}, got {}", wanted, list(v.shape))


def check_keys(query: str, q: Tensor, keys: dict[str, Tensor]) -> None:
    _fla.require(q.dim() == 4, "{} must have shape [B, T, H, K], got {}", query, list(q.shape))
    for name, x in keys.items():
        _fla.require(
            x.shape == q.shape, "{} must have {}'s shape, {}, got {}", name, query, list(q.shape),
            list(x.shape),
        )  # fmt: skip
        _fla.require(
            x.is_floating_point() and x.element_size() > 1, "{} must have a floating dtype, got {}", name,
            x.dtype,
        )  # fmt: skip
