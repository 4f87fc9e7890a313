# SPDX-License-Identifier: Apache-2.0
"""vLLM's `fused_sigmoid_gating_delta_rule_update`, with the signature of vLLM 0.33.

It writes a pool, and so is not differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _fla, _names, _ops, _passes
from .._passes import Gate, Outputs, States
from ..kda import _check_gate, _check_tensors, _raw, _sizes

__all__ = ["fused_sigmoid_gating_delta_rule_update"]

# vLLM's null block: rows that only fill a CUDA graph have this slot.
_NULL_BLOCK = 0
# What the operators' arguments are called here.
NAMES = {
    **_names.OF_DENSE,
    "final_state": "initial_state",
    "initial_state_indices": "ssm_state_indices",
    "state_indices": "ssm_state_indices",
    "num_accepted": "num_accepted_tokens",
}


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The decode step and the verification of drafts of GDN, and with `is_kda` of KDA.

    q, k `[B, T, H, K]`, or `[1, T, H, K]` with `cu_seqlens` for rows of different length; v and the result
    likewise with HV and V; a the raw gate, HV values a token (GDN) or HV * K (KDA), b the logit of beta; the
    gate is `-exp(A_log) * softplus(a + dt_bias)`, and `beta` and `threshold` are softplus's. The pool is
    `[P, HV, V, K]`.

    ssm_state_indices: `[N]`: row n goes from slot n's state to that of its last token, in place. `[N, S]`:
        row n starts from slot `[n, num_accepted_tokens[n] - 1]`, `[n, 0]` without counts, and the state after
        token t goes to slot `[n, t]`. None: row n has slot n. A slot of 0 or below is no slot: such a row
        gives zeros and writes nothing. Indices and counts of more rows than there are may be given.

    Returns (o, the pool); o is float32 where the pool is, since what is read from a state can exceed float16.
    """
    if not (type(inplace_final_state) is type(is_kda) is bool):
        _passes.check_flags(inplace_final_state=inplace_final_state, is_kda=is_kda)
    try:
        _check_gate(A_log, dt_bias, scale, beta, threshold, ("beta", "threshold"))
        if not inplace_final_state:
            raise NotImplementedError(
                "inplace_final_state=False, a new state for every token, is not built: "
                "give cula.cula_verify snapshots"
            )
        batch, tokens, heads, key_dim, _ = _sizes(_ops.decode, q, k, v)
        _check_tensors(
            cu_seqlens=(cu_seqlens, 1), initial_state=(initial_state, 4),
            ssm_state_indices=(ssm_state_indices, None), num_accepted_tokens=(num_accepted_tokens, 1),
        )  # fmt: skip
        if ssm_state_indices is not None and ssm_state_indices.dim() not in (1, 2):
            raise ValueError(
                f"ssm_state_indices must have shape [N] or [N, S], got {list(ssm_state_indices.shape)}"
            )
        rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        algorithm = "kda" if is_kda else "gdn"
        g, logits = _raw(algorithm, a, b, batch, tokens, heads, key_dim)
        gate = Gate("softplus", A_log, dt_bias)
        out = None
        if initial_state is not None and initial_state.dtype == torch.float32 and v.element_size() == 2:
            out = torch.empty_like(v, dtype=torch.float32, memory_format=torch.contiguous_format)
        indices = ssm_state_indices if ssm_state_indices is None else ssm_state_indices[:rows]
        if indices is None or indices.dim() == 1:
            if num_accepted_tokens is not None:
                raise ValueError(
                    "num_accepted_tokens must come with ssm_state_indices of shape [N, S], got counts alone"
                )
            pool = initial_state[:rows] if indices is None and initial_state is not None else initial_state
            o, _, _ = _passes.forward(
                _ops.decode, algorithm, q, k, v, g, logits, gate, scale, use_qk_l2norm_in_kernel, True,
                cu_seqlens=cu_seqlens,
                states=States(None, pool, indices, None, None, _NULL_BLOCK, names=NAMES),
                outputs=Outputs(out),
            )  # fmt: skip
            return o, initial_state
        o = _passes.verify(
            algorithm, q, k, v, g, logits, gate,
            States(None, initial_state, None, None, None, _NULL_BLOCK, names=NAMES), scale=scale,
            qk_l2norm=use_qk_l2norm_in_kernel, beta_is_logit=True, cu_seqlens=cu_seqlens,
            update_state=initial_state is not None, state_indices=indices,
            num_accepted=None if num_accepted_tokens is None else num_accepted_tokens[:rows], out=out,
        )  # fmt: skip
        return o, initial_state
    except Exception as error:
        _fla.refuse_types(fused_sigmoid_gating_delta_rule_update, locals(), error)
        raise
