# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet 2 under the names and conventions of FLA (`fla.ops.gdn2`): b is the erase strength, w the
write strength. Both functions are differentiable as `cula.api` says."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _fla, _ops, _passes
from ._passes import Outputs, dense

__all__ = ["chunk_gdn2", "fused_recurrent_gdn2"]

# What the operators' arguments are called here.
_NAMES = {"erase": "b", "beta": "w"}


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`fla.ops.gdn2.chunk_gdn2`: a whole prompt.

    q, k `[B, T, H, K]`, v and w `[B, T, HV, V]`, b `[B, T, HV, K]`, g `[B, T, HV, K]` the log decay or, with
    `use_gate_in_kernel`, the raw gate (softplus, or bounded where `lower_bound` is given). Heads may be
    grouped, which FLA's have to be repeated for. `A_log` and `dt_bias` hold HV and HV * K values. States are
    float32 `[N, HV, K, V]`, `[N, HV, V, K]` with `state_v_first`; h, the states at chunk starts, is
    `[B, NT, HV, K, V]` in k's dtype and needs `torch.inference_mode()`. `disable_recompute` is that of
    `cula.api`. Tokens of no sequence give zeros. With `cp_context` the tokens are the rank's, as in
    `cula.dist.cula_gdn2_cp`. Errors are FLA's.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("chunk_gdn2", kwargs)
        if not (type(safe_gate) is type(disable_recompute) is bool):
            _passes.check_flags(safe_gate=safe_gate, disable_recompute=disable_recompute)
        if cp_context is not None:
            cu_seqlens = _fla.cu_seqlens_of(cp_context, initial_state, output_final_state)
        _fla.sequences(q, cu_seqlens, initial_state)
        _fla.float32_state(initial_state)
        _fla.gate(use_gate_in_kernel, A_log, lower_bound)
        if chunk_size != 64:
            raise ValueError(f"`chunk_size` must be 64 for GDN-2, got {chunk_size}.")
        _fla.gate(use_gate_in_kernel, A_log, lower_bound, safe_gate)
        _check_shapes(q, k, v, g, b, w)
        if return_intermediate_states:
            allowed = torch.is_inference_mode_enabled()
            _fla.require(allowed, "return_intermediate_states is only allowed in inference mode")
            _fla.require(
                not disable_recompute, "return_intermediate_states must be used with disable_recompute=False"
            )
            _fla.require(cp_context is None, "return_intermediate_states is not supported for CP")
        gate = _fla.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound)
        if cp_context is not None:
            return _fla.along(
                "chunk_gdn2", "gdn2", cp_context, q, k, v, g, w, gate, scale, use_qk_l2norm_in_kernel,
                False, False, b,
            )  # fmt: skip
        o, final_state, h = _passes.forward(
            _ops.prefill, "gdn2", q, k, v, g, w, gate, scale, use_qk_l2norm_in_kernel, False, False,
            cu_seqlens, dense(initial_state, state_v_first),
            Outputs(None, output_final_state, None, return_intermediate_states, chunk_size),
            cu_seqlens_cpu=cu_seqlens_cpu, disable_recompute=disable_recompute, erase=b,
        )  # fmt: skip
        return (o, final_state) if h is None else (o, final_state, h)
    except Exception as error:
        _fla.refuse_types(chunk_gdn2, locals(), error, names=_NAMES)
        raise


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gdn2.fused_recurrent_gdn2`: token after token, made for a few tokens per sequence.

    As `chunk_gdn2`, but the initial state may have any floating dtype that a state may have, and q, k and v
    may differ in dtype; o has v's. A raw gate with neither `A_log` nor `lower_bound` is
    `-e * softplus(g + dt_bias)`, as in FLA. An empty sequence returns its initial state.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("fused_recurrent_gdn2", kwargs)
        _fla.sequences(q, cu_seqlens, initial_state)
        _check_strengths(k, v, b, w)
        if use_gate_in_kernel and A_log is None and lower_bound is None:
            A_log = g.new_ones(v.shape[2], dtype=torch.float32)
        dtype = v.dtype
        q, k, v = _fla.one_dtype(q, k, v)
        o, final_state, _ = _passes.forward(
            _ops.decode, "gdn2", q, k, v, g, w,
            _fla.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
            False, False, cu_seqlens, dense(initial_state, state_v_first), Outputs(None, output_final_state),
            erase=b,
        )  # fmt: skip
        return o.to(dtype), final_state
    except Exception as error:
        _fla.refuse_types(fused_recurrent_gdn2, locals(), error, names=_NAMES)
        raise


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> None:
    of_values = (*v.shape[:3], k.shape[-1])
    _fla.require(q.shape == k.shape, "q, k, g must have the same shape: q is {}, k {}", q.shape, k.shape)
    _fla.require(g.shape == of_values, "g must have shape {}, got {}", of_values, g.shape)
    _check_strengths(k, v, b, w)


def _check_strengths(k: Tensor, v: Tensor, b: Tensor, w: Tensor) -> None:
    of_values = (*v.shape[:3], k.shape[-1])
    _fla.require(
        b.shape == of_values, "b (channel-wise erase gate) must have shape {}, got {}", of_values, b.shape
    )
    _fla.require(
        w.shape == v.shape, "w (channel-wise write gate) must have v's shape, {}, got {}", v.shape, w.shape
    )
    for name, strength in (("b", b), ("w", w)):
        _fla.require(
            strength.is_floating_point(), "{} must have a floating dtype, got {}", name, strength.dtype
        )
