# SPDX-License-Identifier: Apache-2.0
"""The GPU libraries that ours is measured beside, each where it can be imported.

Each gets the call that it is fastest at: everything that it can do in its kernels is done there, and its
states lie as it likes them.
"""

from __future__ import annotations

import dataclasses
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


CUDNN_MODULE = "cudnn.linear_attention.ops"
CUDNN_PLAN = "kda_hopper_cuda"


def _widened(_pass_name: str, inputs: Inputs) -> Inputs:
    """Its kernels read gates and beta in float32."""
    return inputs.but(g=inputs.g.float(), beta=inputs.beta.float())


def _given(_pass_name: str, inputs: Inputs) -> Inputs:
    """Without norms, gate and sigmoid, which its backward pass does not have, and its forward pass may."""
    q, k = (eager.normalized(x).to(x.dtype) for x in (inputs.q, inputs.k))
    g, beta = eager.log_decay(inputs), inputs.beta.float().sigmoid()
    case = inputs.case.but(gate="log_decay", gate_dtype=torch.float32, beta_is_logit=False, qk_l2norm=False)
    return inputs.but(case=case, q=q, k=k, g=g, beta=beta, A_log=None, dt_bias=None)


def _cudnn_prepare(pass_name: str, inputs: Inputs) -> Inputs:
    return (_widened if pass_name == "prefill" else _given)(pass_name, inputs)


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
    asked = {**(raw if case.gate == "bounded" else {}), "output_final_state": True}
    if inputs.g.dtype == inputs.beta.dtype == torch.float32:
        return lambda: run(inputs, **asked)
    return lambda: run(_widened(pass_name, inputs), **asked)


def _cudnn_takes(pass_name: str, case: Case) -> bool:
    shape = case.key_dim == case.value_dim == 128 and case.heads == case.value_heads
    kda = case.algorithm == "kda" and case.gate == "bounded" and case.dtype == torch.bfloat16
    return pass_name in ("prefill", *TRAINING_PASSES) and kda and shape


CUDNN = Impl("cudnn", _cudnn, _cudnn_takes, prepare=_cudnn_prepare)


def _flashinfer_prepare(pass_name: str, inputs: Inputs) -> Inputs:
    """Its prefill has neither gate nor sigmoid, and reads decays, no logarithms of them; its other passes
    have all. Its pool is contiguous."""
    if pass_name == "prefill":
        given = _given(pass_name, inputs)
        return given.but(g=given.g.exp())
    return inputs.but(initial_state=inputs.initial_state.contiguous())


def _flashinfer_prefill(inputs: Inputs) -> Call:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    case, bounds = inputs.case, inputs.cu_seqlens
    if bounds is None:
        bounds = torch.arange(case.batch + 1, device=inputs.q.device, dtype=torch.int32) * case.tokens
    o = torch.empty_like(inputs.v)
    shape = (case.sequences, case.value_heads, case.value_dim, case.key_dim)
    state = torch.empty(shape, dtype=torch.float32, device=inputs.q.device)
    packed = [x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)]
    named = {
        "scale": case.options["scale"],
        "output_final_state": True,
        "cu_seqlens": bounds,
        "output": o.flatten(0, 1),
        "output_state": state,
    }

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        chunk_gated_delta_rule(*packed, **named)
        return o, state

    return call


def _flashinfer(pass_name: str, inputs: Inputs) -> Call:
    if pass_name == "prefill":
        return _flashinfer_prefill(inputs)
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    case, pool = inputs.case, inputs.initial_state
    o = torch.empty_like(inputs.v)
    tensors = (inputs.q, inputs.k, inputs.v, None, inputs.A_log, inputs.g, inputs.dt_bias, inputs.beta)
    named = {
        "scale": case.options["scale"],
        "output": o,
        "use_qk_l2norm": case.qk_l2norm,
        "initial_state": pool,
        "initial_state_indices": inputs.initial_state_indices,
    }
    if pass_name == "decode":
        return lambda: gated_delta_rule_decode_pretranspose(*tensors, **named)
    named["disable_state_update"] = True
    kept = None
    if not case.reads_only:
        shape = (case.sequences, case.lengths[0], *pool.shape[1:])
        kept = named["intermediate_states_buffer"] = pool.new_empty(shape)

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        gated_delta_rule_decode_pretranspose(*tensors, **named)
        return o, None if kept is None else kept[:, -1]

    return call


def _flashinfer_takes(pass_name: str, case: Case) -> bool:
    gdn = case.algorithm == "gdn" and case.gate == "softplus" and case.dtype == torch.bfloat16
    return pass_name in ("prefill", "decode", "verify") and gdn and case.key_dim == case.value_dim == 128


FLASHINFER = Impl("flashinfer", _flashinfer, _flashinfer_takes, prepare=_flashinfer_prepare)

# The module to import, and what is measured of it.
PEERS = (
    ("flash_kda", Impl("flash_kda", _flash_kda, _flash_kda_takes)),
    (fla.MODULE, fla.FLA),
    (fla.MODULE, fla.FLA_KEEPS),
    (CUDNN_MODULE, CUDNN),
    ("flashinfer.gdn_decode", FLASHINFER),
)

# A prefill of cuDNN's that leaves norms, gate and sigmoid to others, and one that leaves nothing.
CUDNN_FORMS = (
    (CUDNN_MODULE, dataclasses.replace(CUDNN, name="cudnn:given", prepare=_given)),
    (CUDNN_MODULE, Impl("cudnn:whole", _cudnn, _cudnn_takes)),
)


def peers() -> list[Impl]:
    return fla.importable(PEERS)


def cudnn_forms() -> list[Impl]:
    return fla.importable(CUDNN_FORMS)
