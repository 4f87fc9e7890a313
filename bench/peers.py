# SPDX-License-Identifier: Apache-2.0
"""The GPU libraries that ours is measured beside, each where it can be imported.

Each gets the call that it is fastest at: everything that it can do in its kernels is done there, and its
states lie as it likes them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch

from bench import eager, training
from bench.impls import Bind, Impl, keywords, verify_slots
from bench.measure import Call
from cula_testing.cases import TRAINING_PASSES, Case, Inputs

# chunk_kda would hand its calls to FlashKDA, which is a peer of its own.
os.environ.setdefault("FLA_FLASH_KDA", "0")


def _fla_chunk(inputs: Inputs, **more: Any) -> Call:
    """State V-first as FLA's own layers ask for it."""
    case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
    common = {
        "state_v_first": True,
        "cu_seqlens": inputs.cu_seqlens,
        "scale": case.options["scale"],
        **more,
    }
    if case.algorithm == "kda":
        from fla.ops.kda import chunk_kda

        named = {**common, **keywords(inputs), "safe_gate": case.gate == "bounded"}
        named["dt_bias"] = inputs.dt_bias.flatten()  # as its gradient is
        return lambda: chunk_kda(q, k, v, inputs.g, inputs.beta, **named)
    if case.algorithm == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        named = {**common, **keywords(inputs)}
        return lambda: chunk_gated_delta_rule(q, k, v, inputs.g, inputs.beta, **named)
    if case.algorithm == "delta":
        from fla.ops.delta_rule import chunk_delta_rule

        # It knows neither logits of beta nor states V-first, and is asked for no state.
        beta = inputs.beta.sigmoid() if case.beta_is_logit else inputs.beta
        named = {**common, "use_qk_l2norm_in_kernel": case.qk_l2norm}
        del named["state_v_first"]
        return lambda: chunk_delta_rule(q, k, v, beta, **named)
    if case.algorithm == "gla":
        from fla.ops.gla import chunk_gla

        return lambda: chunk_gla(q, k, v, inputs.g, **common)
    # chunk_lightning_attn makes g_gamma from the layer's number and calls this.
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda: chunk_simple_gla(q, k, v, g_gamma=inputs.decay, **common)


def _fla_decode(inputs: Inputs, slots: torch.Tensor) -> Call:
    case, q, k, v, g, beta = inputs.case, inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    common = {**keywords(inputs), "state_v_first": True, "scale": case.options["scale"]}
    if case.algorithm == "kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        named = {
            **common,
            "initial_state": inputs.initial_state,
            "ssm_state_indices": slots,
            "inplace_final_state": True,
            "out": torch.empty_like(v),
        }
        return lambda: fused_recurrent_kda_fwd(q, k, v, g, beta, **named)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    # It knows no pool: dense states in, new ones out, and nobody has to gather or scatter them.
    states = inputs.initial_state[slots.long()]
    named = {**common, "initial_state": states, "output_final_state": True}
    return lambda: fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **named)


def _fla(**of_training: Any) -> Bind:
    def bind(pass_name: str, inputs: Inputs) -> Call:
        if inputs.cu_seqlens is not None:
            inputs = inputs.but(cu_seqlens=inputs.cu_seqlens.long())
        if pass_name in TRAINING_PASSES:
            return training.bind(pass_name, inputs, lambda given: _fla_chunk(given, **of_training)()[0])
        if pass_name == "prefill":
            return _fla_chunk(inputs, output_final_state=True)
        if pass_name == "decode":
            return _fla_decode(inputs, inputs.initial_state_indices)
        # A row starts from the slot of its first draft token and leaves that token's state there.
        slots = verify_slots(inputs)
        inputs.initial_state[slots[:, 0].long()] = inputs.initial_state[inputs.initial_state_indices.long()]
        return _fla_decode(inputs, slots)

    return bind


def _fla_takes(pass_name: str, case: Case) -> bool:
    trained = ("kda", "gdn", "gla", "lightning", "delta")
    known = {"prefill": trained[:-1], "decode": ("kda", "gdn"), "verify": ("kda",)}
    return case.algorithm in known.get(pass_name, trained)


def _fla_keeps(pass_name: str, case: Case) -> bool:
    """KDA's backward pass recomputes most of the forward pass, unless it is told to keep that."""
    return pass_name in TRAINING_PASSES and case.algorithm == "kda"


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


def tune_briefly() -> None:
    """From now on Triton times a candidate for 20 ms, not for 100: it chooses as well, and a run has
    thousands."""
    if importlib.util.find_spec("triton") is not None:
        testing = importlib.import_module("triton.testing")
        testing.do_bench = functools.partial(testing.do_bench, warmup=5, rep=20)


# The module to import, and what is measured of it.
PEERS = (
    ("flash_kda", Impl("flash_kda", _flash_kda, _flash_kda_takes)),
    ("fla.ops", Impl("fla", _fla(), _fla_takes)),
    ("fla.ops", Impl("fla:disable_recompute", _fla(disable_recompute=True), _fla_keeps)),
    ("cudnn.linear_attention.ops", Impl("cudnn", _cudnn, _cudnn_takes, prepare=_cudnn_prepare)),
)


def peers() -> list[Impl]:
    found = []
    for module, impl in PEERS:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a peer that cannot be loaded here is left out, whatever the reason
            print(f"{impl.name} is left out: importing {module}: {error}")
            continue
        found.append(impl)
    return found
