# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet under the names and conventions of `fla.ops.gated_delta_rule`.

The functions are differentiable as `cula.api` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _fla, _ops, _passes
from ._passes import Gate, Outputs, dense

__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`: a whole prompt.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g and beta `[B, T, HV]`; with `use_gate_in_kernel` the log decay
    is `-exp(A_log) * softplus(g + dt_bias)` with HV values each. States are `[N, HV, K, V]`, `[N, HV, V, K]`
    with `state_v_first`; the initial state of any floating dtype, the final one float32. `chunk_indices` and
    `chunk_size` change nothing here. `cp_context`: FLA's `FLACPContext`; the tokens are this rank's, as in
    `cula.dist.cula_gdn_cp`.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q and k must have the same number of heads, got {q.shape[2]} and {k.shape[2]}."
            )
        if q.shape[2] and v.shape[2] % q.shape[2]:
            raise ValueError(
                f"For GVA, num_v_heads (HV={v.shape[2]}) must be evenly divisible by "
                f"num_qk_heads (H={q.shape[2]})."
            )
        _fla.options("chunk_gated_delta_rule", kwargs)
        if chunk_size not in (16, 32, 64):
            raise ValueError(f"`chunk_size` must be 16, 32 or 64, got {chunk_size}.")
        if cp_context is not None:
            cu_seqlens = _fla.cu_seqlens_of(cp_context, initial_state, output_final_state)
        _fla.sequences(q, cu_seqlens, initial_state)
        _fla.require(
            not use_gate_in_kernel or A_log is not None,
            "A_log must be provided when use_gate_in_kernel=True.",
        )
        _fla.beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        gate = _passes.LOG_DECAY
        if use_gate_in_kernel is not False:
            gate = Gate(_passes.gate_of(use_gate_in_kernel, None), A_log, dt_bias)
        if cp_context is not None:
            return _fla.along(
                "chunk_gated_delta_rule", "gdn", cp_context, q, k, v, g, beta, gate, scale,
                use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
            )  # fmt: skip
        o, final_state, _ = _passes.forward(
            _ops.prefill, "gdn", q, k, v, g, beta, gate, scale, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens, dense(initial_state, state_v_first),
            Outputs(None, output_final_state),
        )  # fmt: skip
        return o, final_state
    except Exception as error:
        _fla.refuse_types(chunk_gated_delta_rule, locals(), error)
        raise


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`: token after token.

    The log decays g `[B, T, HV]` and gk `[B, T, HV, K]` add up; with neither it is the plain delta rule. beta
    is `[B, T, HV]` or `[B, T, HV, V]`, one if None. A decay `gv` along V is outside the family.
    q, k and v may differ in dtype; o has v's.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("fused_recurrent_gated_delta_rule", kwargs)
        _fla.forward_only(False, gv)
        _fla.sequences(q, cu_seqlens, initial_state)
        _fla.beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        gate = _passes.LOG_DECAY
        if use_gate_in_kernel is not False:
            if g is None or A_log is None:
                raise ValueError("`g` and `A_log` must be provided when `use_gate_in_kernel=True`.")
            if gk is not None:
                raise NotImplementedError("gk beside a raw gate is not built: gate g first")
            gate = Gate(_passes.gate_of(use_gate_in_kernel, None), A_log, dt_bias)
        if beta is None:
            beta = v.new_ones(v.shape[:3])
        algorithm = "kda" if gk is not None else "delta" if g is None else "gdn"
        dtype = v.dtype
        q, k, v = _fla.one_dtype(q, k, v)
        if gk is not None:
            g = _sum_of_decays(g, gk)
        o, final_state, _ = _passes.forward(
            _ops.decode, algorithm, q, k, v, g, beta, gate, scale, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens, dense(initial_state, state_v_first),
            Outputs(None, output_final_state),
        )  # fmt: skip
        return o.to(dtype), final_state
    except Exception as error:
        _fla.refuse_types(fused_recurrent_gated_delta_rule, locals(), error)
        raise


def _sum_of_decays(g: Tensor | None, gk: Tensor) -> Tensor:
    """In float32 at least, as FLA's kernel adds them up."""
    for name, decay in (("gk", gk), ("g", g)):
        if decay is not None and not (decay.is_floating_point() and decay.element_size() > 1):
            raise ValueError(f"{name} must have a floating-point dtype, got {decay.dtype}")
    if g is None:
        return gk
    if g.shape != gk.shape[:3]:
        raise ValueError(f"g must have shape [B, T, HV] = {list(gk.shape[:3])}, got {list(g.shape)}")
    wide = torch.promote_types(torch.promote_types(gk.dtype, g.dtype), torch.float32)
    return gk.to(wide) + g.to(wide).unsqueeze(-1)


# FLA's short names.
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
