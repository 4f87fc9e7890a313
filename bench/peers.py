# SPDX-License-Identifier: Apache-2.0
"""The GPU libraries that ours is measured beside, each where it can be imported.

Each gets the call that it is fastest at: everything that it can do in its kernels is done there, and its
states lie as it likes them.
"""

from __future__ import annotations

from typing import Any

import torch

from cula.bench import eager, fla, training
from cula.bench.impls import Impl
from cula.bench.measure import Call
from cula_testing.cases import TRAINING_PASSES, Case, Inputs


def _flash_kda(_pass_name: str, inputs: Inputs) -> Call:
    import flash_kda

    case, q = inputs.case, inputs.q
    cu = None if inputs.cu_seqlens is None else inputs.cu_seqlens.long()
    o = torch.empty_like(inputs.v)
    shape = (case.sequences, case.value_heads, case.value_dim, case.key_dim)
    state = torch.empty(shape, dtype=torch.float32, device=q.device)
    named = {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias, "lower_bound": case.lower_bound}

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        flash_kda.fwd(
            q, inputs.k, inputs.v, inputs.g, inputs.beta, case.options["scale"], o,
            **named, final_state=state, cu_seqlens=cu,
        )  # fmt: skip
        return o, state

    return call


def _flash_kda_takes(pass_name: str, case: Case) -> bool:
    shape = case.key_dim == case.value_dim == 128 and case.heads == case.value_heads
    return pass_name == "prefill" and case.algorithm == "kda" and case.gate == "bounded" and shape


CUDNN_PLAN = "kda_hopper_cuda"


def _cudnn_prepare(pass_name: str, inputs: Inputs) -> Inputs:
    """Its kernels read gates and beta in float32. Its backward pass has no norms, no gate and no sigmoid."""
    case = inputs.case
    if pass_name == "prefill":
        return inputs.but(g=inputs.g.float(), beta=inputs.beta.float())
    q, k = (eager.normalized(x).to(x.dtype) for x in (inputs.q, inputs.k))
    g, beta = eager.log_decay(inputs), inputs.beta.float().sigmoid()
    case = case.but(gate="log_decay", gate_dtype=torch.float32, beta_is_logit=False, qk_l2norm=False)
    return inputs.but(case=case, q=q, k=k, g=g, beta=beta, A_log=None, dt_bias=None)


def _cudnn(pass_name: str, inputs: Inputs) -> Call:
    """It knows packed sequences alone."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    case, bounds = inputs.case, inputs.cu_seqlens
    if bounds is None:
        bounds = torch.arange(case.batch + 1, device=inputs.q.device, dtype=torch.int32) * case.tokens
    named = {"scale": case.options["scale"], "plan_name": CUDNN_PLAN}

    def run(given: Inputs, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        packed = (x.flatten(0, 1) for x in (given.q, given.k, given.v, given.g, given.beta))
        o, state = kimi_delta_attention(*packed, bounds, **named, **more)
        return o.view(given.v.shape), state

    if pass_name in TRAINING_PASSES:
        return training.bind(pass_name, inputs, lambda given: run(given)[0])
    raw = {
        "use_qk_l2norm_in_kernel": case.qk_l2norm,
        "use_beta_sigmoid_in_kernel": case.beta_is_logit,
        "safe_gate": True,
        "gate_lower_bound": case.lower_bound,
        "a_log": inputs.A_log,
        "dt_bias": inputs.dt_bias,
    }
    return lambda: run(inputs, **raw, output_final_state=True)


def _cudnn_takes(pass_name: str, case: Case) -> bool:
    shape = case.key_dim == case.value_dim == 128 and case.heads == case.value_heads
    kda = case.algorithm == "kda" and case.gate == "bounded" and case.dtype == torch.bfloat16
    return pass_name in ("prefill", *TRAINING_PASSES) and kda and shape


# The module to import, and what is measured of it.
PEERS = (
    ("flash_kda", Impl("flash_kda", _flash_kda, _flash_kda_takes)),
    (fla.MODULE, fla.FLA),
    (fla.MODULE, fla.FLA_KEEPS),
    ("cudnn.linear_attention.ops", Impl("cudnn", _cudnn, _cudnn_takes, prepare=_cudnn_prepare)),
)


def peers() -> list[Impl]:
    return fla.importable(PEERS)
