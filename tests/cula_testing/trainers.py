# SPDX-License-Identifier: Apache-2.0
"""The calls of training frameworks to FLA, with their arguments as they give them: which, of what dtype, and
how they lie in memory. Written from what the frameworks do, not from their text: Megatron-LM
(megatron/core/ssm/gated_delta_net/gdn.py, gdn2.py and kda.py) and torchtitan (models/common/kda.py, while it
called FLA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cula_testing.cases import Case, Inputs


class Trainer(NamedTuple):
    """operation, name: FLA's function. case: what its calls compute, with q, k, v in any dtype. call: made
    with the function, the tensors and the context of several ranks."""

    operation: str
    name: str
    case: Case
    prepare: Callable[[Inputs], Inputs]
    call: Callable[[Callable, Inputs, object], tuple]


def _megatron_gdn(inputs: Inputs) -> Inputs:
    """Norms, gates and the repetition of heads are PyTorch's. The log decay is float32, the write strength in
    the dtype of the model."""
    return inputs.but(beta=inputs.beta.to(inputs.q.dtype))


def _call_megatron_gdn(function: Callable, inputs: Inputs, _context: object) -> tuple:
    return function(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        g=inputs.g,
        beta=inputs.beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=inputs.cu_seqlens,
    )


def _megatron_gdn2(inputs: Inputs) -> Inputs:
    """As GDN's, with strengths per channel in the dtype of the model: b erases, w writes."""
    return inputs.but(erase=inputs.erase.to(inputs.q.dtype), beta=inputs.beta.to(inputs.q.dtype))


def _call_megatron_gdn2(function: Callable, inputs: Inputs, _context: object) -> tuple:
    return function(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        g=inputs.g,
        b=inputs.erase,
        w=inputs.beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=inputs.cu_seqlens,
    )


def _megatron_kda(inputs: Inputs) -> Inputs:
    """The raw gate is a slice of a projection [T, B, ..] whose first dimensions are swapped."""
    wide = torch.cat([inputs.q.flatten(2), inputs.g.flatten(2).to(inputs.q.dtype)], -1)
    swapped = wide.transpose(0, 1).contiguous().transpose(0, 1)
    raw = swapped[..., inputs.q.flatten(2).shape[-1] :].unflatten(-1, inputs.g.shape[2:])
    return inputs.but(g=raw, beta=inputs.beta.float())


def _call_megatron_kda(lower_bound: float | None) -> Callable[[Callable, Inputs, object], tuple]:
    def call(function: Callable, inputs: Inputs, context: object) -> tuple:
        return function(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias.flatten(),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            use_gate_in_kernel=True,
            safe_gate=lower_bound is not None,
            lower_bound=lower_bound,
            cu_seqlens=inputs.cu_seqlens,
            cp_context=context,
        )

    return call


def _torchtitan(inputs: Inputs) -> Inputs:
    """q, k and v are slices of one projection; gate and write strength are raw."""
    return inputs.but(g=inputs.g.to(inputs.q.dtype), beta=inputs.beta.to(inputs.q.dtype))


def _call_torchtitan(function: Callable, inputs: Inputs, _context: object) -> tuple:
    bounds = inputs.cu_seqlens
    return function(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias.reshape(-1),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=inputs.case.lower_bound,
        cu_seqlens=bounds,
        cu_seqlens_cpu=None if bounds is None else bounds.cpu(),
    )


_KDA = Case("kda", state=False, gate="bounded")

TRAINERS = {
    "Megatron GDN": Trainer(
        "gated_delta_rule", "chunk_gated_delta_rule", Case("gdn", state=False), _megatron_gdn,
        _call_megatron_gdn,
    ),
    "Megatron GDN-2": Trainer(
        "gdn2", "chunk_gdn2", Case("gdn2", state=False, beta_per_value=True), _megatron_gdn2,
        _call_megatron_gdn2,
    ),
    "Megatron KDA": Trainer(
        "kda", "chunk_kda", _KDA.but(gate="softplus"), _megatron_kda, _call_megatron_kda(None)
    ),
    "Megatron KDA, safe gate": Trainer(
        "kda", "chunk_kda", _KDA, _megatron_kda, _call_megatron_kda(_KDA.lower_bound)
    ),
    "torchtitan KDA": Trainer(
        "kda", "chunk_kda", _KDA.but(qk_l2norm=True, beta_is_logit=True, fused=True), _torchtitan,
        _call_torchtitan,
    ),
}  # fmt: skip
