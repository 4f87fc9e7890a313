# SPDX-License-Identifier: Apache-2.0
"""Level 0: the names of FLA, cuLA, SGLang and FlashKDA, with their signatures, layouts, defaults and
refusals."""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace

import pytest
import torch

import cula
from cula_testing import gradients, passes
from cula_testing.cases import Case, Inputs, make, state_like
from cula_testing.compare import assert_same_bits, errors

STD = "scale=None, initial_state=None, output_final_state=False"
CU = "cu_seqlens=None, cu_seqlens_cpu=None"
L2 = "use_qk_l2norm_in_kernel=False"
GATE = "use_gate_in_kernel=False"
BETA = "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
VF = "state_v_first=False"

# What upstream's positional parameters are, in order, with their defaults.
SIGNATURES = {
    "cula.kda.chunk_kda": f"q, k, v, g, beta, {STD}, {L2}, {GATE}, {BETA}, safe_gate=False, "
    f"lower_bound=None, disable_recompute=False, return_intermediate_states=False, {VF}, {CU}, "
    "cp_context=None, use_graph=False, max_num_seqs=None",
    "cula.kda.fused_recurrent_kda": f"q, k, v, g, beta, A_log=None, dt_bias=None, {STD}, {L2}, {GATE}, "
    f"{BETA}, lower_bound=None, {VF}, cu_seqlens=None",
    "cula.kda.kda_prefill_hopper": f"q, k, v, g, beta, {STD}, {L2}, {GATE}, safe_gate=False, "
    "lower_bound=None, cu_seqlens=None, chunk_indices=None",
    "cula.kda.kda_decode": "A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, "
    "cu_seqlens=None, scale=None, use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, "
    "out=None, state_layout='vk'",
    "cula.kda.fused_sigmoid_gating_delta_rule_update": "A_log, a, dt_bias, softplus_beta, "
    f"softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale=None, {L2}, "
    "cu_seqlens=None, is_kda=False, lower_bound=None, disable_state_update=False, "
    "intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None, "
    "retrieve_parent_token=None, cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, "
    "replayssm_g=None, replayssm_beta=None, match_cutedsl_decode=False",
    "cula.compat.vllm.fused_sigmoid_gating_delta_rule_update": "A_log, a, b, dt_bias, q, k, v, beta=1.0, "
    "threshold=20.0, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None, "
    f"ssm_state_indices=None, num_accepted_tokens=None, {L2}, is_kda=False",
    "cula.gdn.chunk_gated_delta_rule": f"q, k, v, g, beta, {STD}, {L2}, {BETA}, {VF}, {CU}, "
    "chunk_indices=None, cp_context=None",
    "cula.gdn.fused_recurrent_gated_delta_rule": f"q, k, v, g=None, gk=None, gv=None, beta=None, {STD}, "
    f"{L2}, {GATE}, A_log=None, dt_bias=None, {BETA}, {VF}, cu_seqlens=None",
    "cula.gdn2.chunk_gdn2": f"q, k, v, g, b, w, {STD}, {L2}, {GATE}, {CU}, safe_gate=False, "
    f"lower_bound=None, disable_recompute=False, return_intermediate_states=False, {VF}, cp_context=None",
    "cula.gdn2.fused_recurrent_gdn2": f"q, k, v, g, b, w, A_log=None, dt_bias=None, {STD}, {L2}, {GATE}, "
    f"lower_bound=None, {VF}, cu_seqlens=None",
    "cula.gated_delta_product.chunk_gated_delta_product": f"q, k, v, g, beta, num_householder, {STD}, {L2}, "
    f"{CU}, cp_context=None",
    "cula.gla.chunk_gla": f"q, k, v, g, {STD}, {VF}, {CU}",
    "cula.gla.fused_recurrent_gla": f"q, k, v, gk=None, gv=None, {STD}, reverse=False, {VF}, cu_seqlens=None",
    "cula.simple_gla.chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {STD}, {VF}, {CU}",
    "cula.simple_gla.fused_recurrent_simple_gla": f"q, k, v, g=None, g_gamma=None, {STD}, reverse=False, "
    f"{VF}, cu_seqlens=None",
    "cula.simple_gla.fused_chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {STD}, cu_seqlens=None",
    "cula.delta_rule.chunk_delta_rule": f"q, k, v, beta, {STD}, {L2}, {CU}",
    "cula.delta_rule.fused_recurrent_delta_rule": f"q, k, v, beta=None, {STD}, {L2}, cu_seqlens=None",
    "cula.retention.chunk_retention": f"q, k, v, {STD}, cu_seqlens=None",
    "cula.retention.fused_chunk_retention": f"q, k, v, {STD}, cu_seqlens=None",
    "cula.linear_attn.chunk_linear_attn": f"q, k, v, {STD}, normalize=True, cu_seqlens=None",
    "cula.linear_attn.fused_chunk_linear_attn": f"q, k, v, {STD}, normalize=True, cu_seqlens=None",
    "cula.linear_attn.fused_recurrent_linear_attn": f"q, k, v, {STD}, reverse=False, normalize=False, "
    "cu_seqlens=None",
    "cula.lightning.chunk_lightning_attn": f"q, k, v, layer_idx, num_layers, {STD}, cu_seqlens=None",
    "cula.lightning.fused_recurrent_lightning_attn": f"q, k, v, layer_idx, num_layers, {STD}, reverse=False, "
    "cu_seqlens=None",
    "cula.lightning.lightning_attn_fwd": "Q, K, V, decay, scale=1.0, initial_state=None, "
    "output_final_state=False, chunk_size=64",
    "cula.lightning.lightning_attn_fwd_varlen": "Q, K, V, decay, cu_seqlens, scale=1.0, state_pool=None, "
    "initial_state_indices=None, chunk_size=64, persistent=True",
    "cula.lightning.linear_attention_decode": "q, k, v, s, out, softmax_scale, stride_q, stride_k, stride_v, "
    "stride_s, stride_o, s_offsets, decay_scales, HEAD_DIM, K_SPLIT_DIM, V_SPLIT_DIM",
    "cula.utils.get_kda_fused_fwd": "device=None",
    "cula.compat.flash_kda.fwd": "q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, "
    "initial_state=None, final_state=None, cu_seqlens=None",
    "cula.compat.flash_kda.get_workspace_size": "T_total, H, N=1",
}
# What upstream takes among its **kwargs.
KEYWORDS = {
    "cula.kda.chunk_kda": {"A_log", "dt_bias", "chunk_size"},
    "cula.gdn2.chunk_gdn2": {"A_log", "dt_bias", "chunk_size"},
    "cula.kda.kda_prefill_hopper": {"A_log", "dt_bias"},
    "cula.kda.fused_sigmoid_gating_delta_rule_update": {"out", "state_layout"},  # cuLA's
    "cula.gdn.chunk_gated_delta_rule": {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size"},
}


def find(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path):
    parameters = inspect.signature(find(path)).parameters.values()
    positional = [
        p.replace(annotation=p.empty) for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(map(str, positional)) == SIGNATURES[path]
    assert KEYWORDS.get(path, set()) <= {
        p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_re_exports():
    for name in ("kda_decode", "fused_sigmoid_gating_delta_rule_update", "linear_attention_decode"):
        assert hasattr(cula.ops, name)
    assert find("cula.ops.lightning_attn.lightning_attn_fwd") is cula.lightning.lightning_attn_fwd
    assert find("cula.ops.la_decode.linear_attention_decode") is cula.lightning.linear_attention_decode
    assert cula.LinearAttentionChunkwiseDecay is cula.lightning.LinearAttentionChunkwiseDecay
    for device in (None, "cpu", "cuda:0"):
        assert callable(cula.utils.get_kda_fused_fwd(device))


# Results: a drop-in is an op with other defaults, so its bits are the op's. FLA's states are K-first.


def gate_arguments(inputs: Inputs) -> dict:
    case = inputs.case
    named = {"use_gate_in_kernel": True, "A_log": inputs.A_log, "dt_bias": inputs.dt_bias}
    named |= {"lower_bound": case.lower_bound} if case.gate == "bounded" else {}
    return (
        {}
        if case.gate == "log_decay"
        else {name: value for name, value in named.items() if value is not None}
    )


def delta_arguments(case: Case) -> dict:
    return {
        "use_qk_l2norm_in_kernel": case.qk_l2norm,
        "use_beta_sigmoid_in_kernel": case.beta_is_logit,
        "allow_neg_eigval": case.allow_neg_eigval,
    }


def chunk_lightning_slopes(H: int) -> torch.Tensor:
    """FLA's decay of layer 1 of 4."""
    return -torch.arange(H, dtype=torch.float32) * (8 / H) * (1 - 1 / 4)


def call_kda(function, x, **more):
    return function(x.q, x.k, x.v, x.g, x.beta, **gate_arguments(x), **delta_arguments(x.case), **more)


def call_gdn(function, x, **more):
    return function(x.q, x.k, x.v, g=x.g, beta=x.beta, **gate_arguments(x), **delta_arguments(x.case), **more)


def call_gdn2(function, x, **more):
    l2norm = {"use_qk_l2norm_in_kernel": x.case.qk_l2norm}
    return function(x.q, x.k, x.v, x.g, x.erase, x.beta, **gate_arguments(x), **l2norm, **more)


def call_gdp(function, x, **more):
    l2norm = {"use_qk_l2norm_in_kernel": x.case.qk_l2norm}
    return function(x.q, x.k, x.v, x.g, x.beta, x.case.writes, **l2norm, **more)


def call_delta(function, x, **more):
    return function(x.q, x.k, x.v, x.beta, use_qk_l2norm_in_kernel=x.case.qk_l2norm, **more)


# (path, algorithm, how it is called)
FLA = [
    ("cula.kda.chunk_kda", "kda", call_kda),
    ("cula.kda.fused_recurrent_kda", "kda", call_kda),
    ("cula.gdn.chunk_gated_delta_rule", "gdn", call_gdn),
    ("cula.gdn.fused_recurrent_gated_delta_rule", "gdn", call_gdn),
    ("cula.gdn2.chunk_gdn2", "gdn2", call_gdn2),
    ("cula.gdn2.fused_recurrent_gdn2", "gdn2", call_gdn2),
    ("cula.gated_delta_product.chunk_gated_delta_product", "gdp", call_gdp),
    ("cula.gated_delta_product.chunk_gated_delta_product", "delta_product", call_gdp),
    ("cula.gla.chunk_gla", "gla", lambda f, x, **more: f(x.q, x.k, x.v, x.g, **more)),
    ("cula.gla.fused_recurrent_gla", "gla", lambda f, x, **more: f(x.q, x.k, x.v, gk=x.g, **more)),
    ("cula.gla.fused_recurrent_gla", "linear", lambda f, x, **more: f(x.q, x.k, x.v, **more)),
    ("cula.simple_gla.chunk_simple_gla", "simple_gla",
     lambda f, x, **more: f(x.q, x.k, x.v, x.g, x.decay, **more)),
    ("cula.simple_gla.chunk_simple_gla", "lightning",
     lambda f, x, **more: f(x.q, x.k, x.v, g_gamma=x.decay, **more)),
    ("cula.simple_gla.fused_recurrent_simple_gla", "simple_gla",
     lambda f, x, **more: f(x.q, x.k, x.v, g=x.g, g_gamma=x.decay, **more)),
    ("cula.delta_rule.chunk_delta_rule", "delta", call_delta),
    ("cula.delta_rule.fused_recurrent_delta_rule", "delta", call_delta),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("state", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize(("path", "algorithm", "call"), FLA)
def test_fla(path, algorithm, call, packed, state):
    lengths = (70, 0, 9) if packed else (70, 70)
    case = Case(
        algorithm,
        lengths,
        packed=packed,
        state=state,
        key_dim=64,
        value_dim=32,
        qk_l2norm=algorithm == "delta",
    )
    if algorithm == "kda":
        case = case.but(
            gate="bounded", value_heads=4, qk_l2norm=True, beta_is_logit=True, allow_neg_eigval=True
        )
    if algorithm == "gdn":
        case = case.but(gate="softplus", value_heads=4, qk_l2norm=True, beta_is_logit=True)
    if algorithm == "gdp":
        case = case.but(value_heads=4, qk_l2norm=True, householders=3)
    if algorithm == "gdn2":
        case = case.but(gate="softplus", value_heads=4, qk_l2norm=True, beta_per_value=True)
    inputs = make(case)
    wanted = (passes.decode if "recurrent" in path else passes.prefill)(inputs)
    h0 = inputs.initial_state.mT.contiguous() if state else None
    o, final_state = call(
        find(path), inputs, initial_state=h0, output_final_state=True, cu_seqlens=inputs.cu_seqlens
    )
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state.mT, final_state)
    o, nothing = call(find(path), inputs, initial_state=h0, cu_seqlens=inputs.cu_seqlens, scale=64**-0.5)
    assert nothing is None
    assert_same_bits("o", wanted.o, o)
    if "state_v_first" in inspect.signature(find(path)).parameters:
        o, final_state = call(
            find(path), inputs, initial_state=inputs.initial_state, output_final_state=True,
            cu_seqlens=inputs.cu_seqlens, state_v_first=True,
        )  # fmt: skip
        assert_same_bits("o", wanted.o, o)
        assert_same_bits("final_state", wanted.final_state, final_state)


def test_chunk_kda_returns_intermediate_states():
    inputs = make(Case("kda", (150,), value_dim=32, state=False))
    with torch.inference_mode():
        o, final_state, h = cula.kda.chunk_kda(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, output_final_state=True,
            return_intermediate_states=True, chunk_size=32,
        )  # fmt: skip
    room = torch.full((1, 5, 2, 32, 64), float("nan"), dtype=torch.bfloat16)
    wanted = passes.prefill(inputs, chunk_states=room, chunk_tokens=32)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state.mT, final_state)
    assert_same_bits("h", room.mT, h)


@pytest.mark.parametrize("name", ["chunk_gdn2"])
def test_intermediate_states_of_gdn2(name):
    inputs = make(Case("gdn2", (150,), value_dim=32, state=False, beta_per_value=True))
    with torch.inference_mode():
        o, final_state, h = find(f"cula.gdn2.{name}")(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.erase, inputs.beta, output_final_state=True,
            return_intermediate_states=True,
        )  # fmt: skip
    room = torch.full((1, 3, 2, 32, 64), float("nan"), dtype=torch.bfloat16)
    wanted = passes.prefill(inputs, chunk_states=room, chunk_tokens=64)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state.mT, final_state)
    assert_same_bits("h", room.mT, h)


@pytest.mark.parametrize("name", ["chunk_gdn2", "fused_recurrent_gdn2"])
def test_gdn2_with_one_strength_is_kda(name):
    inputs = make(Case("kda", (70, 70), value_heads=4, gate="softplus", qk_l2norm=True, dtype=torch.float32))
    one = inputs.beta.unsqueeze(-1)
    b, w = one.expand(*one.shape[:3], 64), one.expand(inputs.v.shape)
    named = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, **gate_arguments(inputs)}
    found = find(f"cula.gdn2.{name}")(inputs.q, inputs.k, inputs.v, inputs.g, b, w, **named)
    wanted = cula.kda.chunk_kda(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, **named)
    wanted = [x.double() for x in wanted]
    for x, y in zip(found, wanted, strict=True):
        assert errors(x, y).rms < 1e-5


@pytest.mark.parametrize("name", ["chunk_gdn2", "fused_recurrent_gdn2"])
def test_gradients_of_gdn2(name):
    inputs = make(Case("gdn2", (70, 0, 9), packed=True, value_heads=4, gate="softplus", beta_per_value=True))
    names = ("q", "k", "v", "g", "erase", "beta", "A_log", "dt_bias", "initial_state")
    leaves = {each: getattr(inputs, each).clone().requires_grad_() for each in names}
    o, final_state = find(f"cula.gdn2.{name}")(
        *(leaves[each] for each in names[:6]), A_log=leaves["A_log"], dt_bias=leaves["dt_bias"],
        initial_state=leaves["initial_state"].mT, output_final_state=True, use_gate_in_kernel=True,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    d_o, d_final = gradients.upstream(inputs)
    found = torch.autograd.grad((o, final_state), list(leaves.values()), (d_o, d_final.mT))
    wanted = gradients.backward(inputs, d_o, d_final)
    for each, gradient in zip(names, found, strict=True):
        assert_same_bits(f"d_{each}", wanted[each].to(gradient.dtype), gradient)


def test_gdp_of_one_write_is_gdn():
    inputs = make(Case("gdn", (70, 70), value_heads=4, qk_l2norm=True, dtype=torch.float32))
    named = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    given = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    found = cula.gated_delta_product.chunk_gated_delta_product(*given, 1, **named)
    wanted = cula.gdn.chunk_gated_delta_rule(*given, **named)
    for x, y in zip(found, wanted, strict=True):
        assert_same_bits("gdn", x, y)


def test_gradients_of_gdp():
    inputs = make(Case("gdp", (70, 0, 9), packed=True, value_heads=4, householders=3, qk_l2norm=True))
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = {each: getattr(inputs, each).clone().requires_grad_() for each in names}
    o, final_state = cula.gated_delta_product.chunk_gated_delta_product(
        *(leaves[each] for each in names[:5]), 3, initial_state=leaves["initial_state"].mT,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    d_o, d_final = gradients.upstream(inputs)
    found = torch.autograd.grad((o, final_state), list(leaves.values()), (d_o, d_final.mT))
    wanted = gradients.backward(inputs, d_o, d_final)
    for each, gradient in zip(names, found, strict=True):
        assert_same_bits(f"d_{each}", wanted[each].to(gradient.dtype), gradient)


@pytest.mark.parametrize("name", ["retention", "lightning"])
@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_fla_constant_decays(name, kind):
    inputs = make(Case("lightning", (70,), heads=4, value_heads=4, value_dim=32))
    H = 4
    if name == "retention":
        inputs.decay = torch.log(1 - torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64))).float()
        function, extra = find(f"cula.retention.{kind}_retention"), ()
    else:
        inputs.decay = chunk_lightning_slopes(H)
        function, extra = find(f"cula.lightning.{kind}_lightning_attn"), (1, 4)
    h0 = inputs.initial_state.mT.contiguous()
    o, final_state = function(inputs.q, inputs.k, inputs.v, *extra, initial_state=h0, output_final_state=True)
    wanted = (passes.decode if kind == "fused_recurrent" else passes.prefill)(inputs)
    assert errors(o, wanted.o.double()).rms < 1e-4
    assert errors(final_state, wanted.final_state.mT.double()).rms < 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_kda_prefill_hopper(packed):
    lengths = (70, 0, 9) if packed else (70, 70)
    inputs = make(Case("kda", lengths, packed=packed, gate="bounded", qk_l2norm=True))
    wanted = passes.prefill(inputs)
    o, final_state = cula.kda.kda_prefill_hopper(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True,
        lower_bound=-5.0, cu_seqlens=inputs.cu_seqlens, A_log=inputs.A_log, dt_bias=inputs.dt_bias.flatten(),
    )  # fmt: skip
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state, final_state)
    assert cula.utils.get_kda_fused_fwd("cpu") is cula.kda.kda_prefill_hopper


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("rows_along", ["batch", "tokens"])
@pytest.mark.parametrize(("name", "algorithm"), [("kda_decode", "kda"), ("update", "kda"), ("update", "gdn")])
def test_cula_decode_functions(name, algorithm, rows_along, layout):
    case = Case(algorithm, (1,) * 3, value_heads=4, value_dim=32, gate="softplus", qk_l2norm=True,
                beta_is_logit=True, pool=True, k_first=layout == "kv")  # fmt: skip
    one, two = make(case), make(case)
    one.initial_state_indices[1] = two.initial_state_indices[1] = -1
    wanted = passes.decode(one, in_place=True)
    q, k, v, a, b = two.q, two.k, two.v, two.g, two.beta
    if rows_along == "tokens":
        q, k, v, a, b = (x.transpose(0, 1) for x in (q, k, v, a, b))
    pool = two.initial_state if layout == "vk" else two.initial_state.mT
    assert pool.stride(-1) == 1
    if name == "kda_decode":
        o = cula.kda.kda_decode(
            two.A_log, two.dt_bias, q, k, v, a.flatten(2), b[:, 0] if rows_along == "batch" else b, pool,
            two.initial_state_indices, state_layout=layout,
        )  # fmt: skip
    else:
        o = cula.kda.fused_sigmoid_gating_delta_rule_update(
            two.A_log, a, two.dt_bias, 1.0, 20.0, q, k, v, b, pool, two.initial_state_indices,
            use_qk_l2norm_in_kernel=True, is_kda=algorithm == "kda", state_layout=layout,
        )  # fmt: skip
    assert o.shape == v.shape
    assert_same_bits("o", wanted.o, o.reshape(wanted.o.shape))
    assert_same_bits("pool", one.initial_state, two.initial_state)


def test_lightning_attn_fwd():
    inputs = make(Case("lightning", (70, 70), value_dim=32, scale=1.0))
    wanted = passes.prefill(inputs)
    o, final_state = cula.lightning.lightning_attn_fwd(
        inputs.q,
        inputs.k,
        inputs.v,
        -inputs.decay,
        initial_state=inputs.initial_state,
        output_final_state=True,
    )
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state, final_state)
    kernel = cula.LinearAttentionChunkwiseDecay(
        has_initial_state=True, output_final_state=True, H=2, K=64, V=32
    )
    o, final_state = kernel(inputs.q, inputs.k, inputs.v, -inputs.decay, inputs.initial_state)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state, final_state)


def test_lightning_attn_fwd_varlen():
    case = Case("lightning", (70, 0, 9), packed=True, pool=True, scale=1.0)
    one, two = make(case), make(case)
    wanted = passes.prefill(one, in_place=True)
    o, pool = cula.lightning.lightning_attn_fwd_varlen(
        two.q, two.k, two.v, -two.decay, two.cu_seqlens, state_pool=two.initial_state,
        initial_state_indices=two.initial_state_indices,
    )  # fmt: skip
    assert pool is two.initial_state
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("pool", one.initial_state, pool)


@pytest.mark.parametrize("flat", [True, False], ids=["[B * H, V, K]", "[B, H, V, K]"])
def test_linear_attention_decode(flat):
    case = Case("lightning", (1,) * 3, scale=0.5)
    inputs, s = make(case), make(case).initial_state
    wanted = passes.decode(inputs)
    out = torch.full((3, 2, 64), float("nan"), dtype=torch.bfloat16)
    q, k, v = (x[:, 0] for x in (inputs.q, inputs.k, inputs.v))
    cula.lightning.linear_attention_decode(
        q, k, v, s.flatten(0, 1) if flat else s, out, 0.5, 0, 0, 0, 0, 0, None, -inputs.decay, 64, 64, 64
    )
    assert_same_bits("o", wanted.o[:, 0], out)
    assert_same_bits("s", wanted.final_state, s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_flash_kda(packed, dtype):
    from cula.compat import flash_kda

    lengths = (70, 0, 9) if packed else (70, 70)
    case = Case("kda", lengths, packed=packed, gate="bounded", qk_l2norm=True, beta_is_logit=True, scale=0.1)
    case = case.but(gate_dtype=torch.bfloat16, state_dtype=dtype, cu_dtype=torch.int64)
    inputs = make(case)
    wanted = passes.prefill(inputs)
    out, final_state = passes.empty_o(inputs), state_like(case, len(lengths))
    returned = flash_kda.fwd(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, 0.1, out, A_log=inputs.A_log,
        dt_bias=inputs.dt_bias, lower_bound=-5.0, initial_state=inputs.initial_state, final_state=final_state,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    assert returned is None
    assert_same_bits("o", wanted.o, out)
    assert_same_bits("final_state", wanted.final_state, final_state)
    assert isinstance(flash_kda.get_workspace_size(8192, 64, 2), int)


# FLA's refusals, in FLA's words.

SMALL = make(Case("kda", (4,), key_dim=16, value_dim=16, state=False))
KDA = {"q": SMALL.q, "k": SMALL.k, "v": SMALL.v, "g": SMALL.g, "beta": SMALL.beta}
GDN = {**KDA, "g": SMALL.g[..., 0]}
GLA = {"q": SMALL.q, "k": SMALL.k, "v": SMALL.v, "g": SMALL.g}
GDN2 = {**GLA, "b": SMALL.k.abs(), "w": SMALL.v.abs()}
TWICE = make(Case("gdp", (4,), key_dim=16, value_dim=16, state=False))
GDP = {**{name: getattr(TWICE, name) for name in ("q", "k", "v", "g", "beta")}, "num_householder": 2}
PRODUCT = "cula.gated_delta_product.chunk_gated_delta_product"
DELTA = {"q": SMALL.q, "k": SMALL.k, "v": SMALL.v, "beta": SMALL.beta}
H0 = torch.zeros(1, 2, 16, 16)
TWO = {"cu_seqlens": torch.tensor([0, 2, 4])}
CONTEXT = SimpleNamespace(group=None, **TWO)
WIDE = torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16)

REFUSALS = [
    ("cula.kda.chunk_kda", KDA, {"chunk_size": 16}, ValueError, "`chunk_size` must be either 32 or 64"),
    ("cula.kda.chunk_kda", KDA, {"use_gate_in_kernel": True}, ValueError, "`A_log` must be provided"),
    ("cula.kda.chunk_kda", KDA, {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(2)},
     ValueError, "`lower_bound` must be specified"),
    ("cula.kda.chunk_kda", KDA, {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0},
     ValueError, "safe range [-5, 0)"),
    ("cula.kda.chunk_kda", KDA, {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": 0.0},
     ValueError, "safe range [-5, 0)"),
    ("cula.kda.chunk_kda", KDA, {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
    ("cula.kda.chunk_kda", KDA, {"initial_state": H0.bfloat16()}, AssertionError,
     "initial_state must be in float32."),
    ("cula.kda.chunk_kda", KDA, {"initial_state": H0, **TWO}, ValueError,
     "The number of initial states is expected to be equal to the number of input sequences, i.e., "
     "2 rather than 1."),
    ("cula.kda.chunk_kda", KDA, {"q": WIDE, **TWO}, ValueError,
     "The batch size is expected to be 1 rather than 2 when using `cu_seqlens`."),
    ("cula.kda.chunk_kda", KDA, {"k": SMALL.k[..., :8]}, AssertionError, "q and k must have the same shape"),
    ("cula.kda.chunk_kda", KDA, {"beta": SMALL.beta[..., :1]}, AssertionError, "beta must have shape"),
    ("cula.kda.chunk_kda", KDA, {"g": SMALL.g[..., :8]}, AssertionError, "g must have shape"),
    ("cula.kda.chunk_kda", KDA, {"return_intermediate_states": True}, AssertionError, "inference mode"),
    ("cula.kda.chunk_kda", KDA, {"state_v_first": True, "transpose_state_layout": True}, ValueError,
     "`transpose_state_layout`"),
    ("cula.kda.chunk_kda", KDA, {"lowerbound": -5.0}, TypeError, "unexpected keyword argument 'lowerbound'"),
    ("cula.cula_kda", KDA, {"cp_context": object()}, NotImplementedError, "cp_context"),
    ("cula.kda.chunk_kda", KDA, {"cp_context": object()}, AssertionError, "cu_seqlens is required for CP"),
    ("cula.kda.chunk_kda", KDA, {"cp_context": CONTEXT, "initial_state": H0}, AssertionError,
     "Initial state is not supported for CP"),
    ("cula.kda.chunk_kda", KDA, {"cp_context": CONTEXT, "output_final_state": True}, AssertionError,
     "Output final state is not supported for CP"),
    ("cula.kda.chunk_kda", KDA, {"cp_context": CONTEXT}, ValueError,
     "chunk_kda: cp_context must have group, got SimpleNamespace"),
    ("cula.gdn.chunk_gated_delta_rule", GDN, {"cp_context": CONTEXT}, ValueError,
     "chunk_gated_delta_rule: cp_context must have group, got SimpleNamespace"),
    ("cula.gdn.chunk_gated_delta_rule", GDN, {"chunk_size": 48}, ValueError, "`chunk_size` must be"),
    ("cula.gdn.chunk_gated_delta_rule", GDN, {"use_gate_in_kernel": True}, AssertionError,
     "A_log must be provided"),
    ("cula.gdn.chunk_gated_delta_rule", GDN, {"allow_neg_eigval": True}, ValueError,
     "use_beta_sigmoid_in_kernel"),
    ("cula.gdn.chunk_gated_delta_rule", GDN, {"k": SMALL.k[:, :, :1]}, ValueError, "same number of heads"),
    ("cula.gdn.chunk_gated_delta_rule", GDN, {"v": torch.zeros(1, 4, 3, 16).bfloat16()}, ValueError,
     "evenly divisible"),
    ("cula.gdn.fused_recurrent_gated_delta_rule", GDN, {"use_gate_in_kernel": True}, ValueError, "`A_log`"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"b": GDN2["b"].long()}, ValueError, "b must have a floating dtype"),
    ("cula.gdn2.fused_recurrent_gdn2", GDN2, {"w": GDN2["w"].long()}, ValueError,
     "w must have a floating dtype"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"chunk_size": 32}, ValueError, "`chunk_size` must be 64 for GDN-2"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"use_gate_in_kernel": True}, ValueError, "`A_log` must be provided"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(2)},
     ValueError, "`lower_bound` must be specified"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"initial_state": H0.bfloat16()}, AssertionError,
     "initial_state must be in float32."),
    ("cula.gdn2.chunk_gdn2", GDN2, {"q": WIDE, **TWO}, ValueError, "expected to be 1 rather than 2"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"k": SMALL.k[..., :8]}, AssertionError, "q, k, g must have the same"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"b": SMALL.beta}, AssertionError, "b (channel-wise erase gate) must"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"w": SMALL.beta}, AssertionError, "w (channel-wise write gate) must"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"b": None}, TypeError, "chunk_gdn2: b must be a tensor, got NoneType"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"return_intermediate_states": True}, AssertionError, "inference mode"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"cp_context": CONTEXT}, ValueError,
     "chunk_gdn2: cp_context must have group, got SimpleNamespace"),
    ("cula.gdn2.chunk_gdn2", GDN2, {"beta": SMALL.beta}, TypeError, "unexpected keyword argument 'beta'"),
    ("cula.gdn2.fused_recurrent_gdn2", GDN2, {"b": SMALL.beta}, AssertionError, "b (channel-wise erase"),
    (PRODUCT, GDP, {"num_householder": 3}, AssertionError, "k must have shape (1, 12, 2, 16), got (1, 8"),
    (PRODUCT, GDP, {"num_householder": 0}, AssertionError, "num_householder must be at least 1, got 0"),
    (PRODUCT, GDP, {"num_householder": 2.0}, TypeError, "num_householder must be of type int, got float"),
    (PRODUCT, GDP, {"v": SMALL.v}, AssertionError, "v must have shape"),
    (PRODUCT, GDP, {"beta": SMALL.beta}, AssertionError, "beta must have shape"),
    (PRODUCT, GDP, {"g": SMALL.g}, AssertionError, "g must have shape"),
    (PRODUCT, GDP, {"k": None}, TypeError, "chunk_gated_delta_product: k must be a tensor, got NoneType"),
    (PRODUCT, GDP, {"cp_context": CONTEXT, "initial_state": H0}, AssertionError,
     "Initial state is not supported for CP"),
    (PRODUCT, GDP, {"cp_context": CONTEXT}, ValueError,
     "chunk_gated_delta_product: cp_context must have group, got SimpleNamespace"),
    (PRODUCT, GDP, {"q": WIDE, **TWO}, AssertionError, "k must have shape (2,"),
    ("cula.gdn2.fused_recurrent_gdn2", GDN2, {"initial_state": H0, **TWO}, ValueError, "2 rather than 1"),
    ("cula.gla.chunk_gla", GLA, {"initial_state": H0.half()}, AssertionError,
     "initial_state must be in float32."),
    ("cula.gla.chunk_gla", GLA, {"g": SMALL.g[..., :8]}, AssertionError, "must have the same shape"),
    ("cula.gla.chunk_gla", GLA, {"chunk_size": 64}, TypeError, "unexpected keyword argument 'chunk_size'"),
    ("cula.gla.fused_recurrent_gla", {"q": SMALL.q, "k": SMALL.k, "v": SMALL.v}, {"reverse": True},
     NotImplementedError, "reverse"),
    ("cula.delta_rule.chunk_delta_rule", DELTA, {"chunk_size": 8}, ValueError,
     "`chunk_size` must be 16, 32 or 64"),
    ("cula.delta_rule.chunk_delta_rule", DELTA, {"beta": SMALL.v}, AssertionError, "beta must be of shape"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "base", "wrong", "error", "words"), REFUSALS)
def test_refusal(path, base, wrong, error, words):
    with pytest.raises(error, match=re.escape(words)):
        find(path)(**{**base, **wrong})


def test_transpose_state_layout_is_the_old_name_of_state_v_first():
    h0 = torch.randn(1, 2, 16, 16)
    wanted = cula.kda.chunk_kda(**KDA, initial_state=h0, output_final_state=True, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        found = cula.kda.chunk_kda(
            **KDA, initial_state=h0, output_final_state=True, transpose_state_layout=True
        )
    for one, other in zip(wanted, found, strict=True):
        assert_same_bits("old name", one, other)


def test_kda_decode_refusals():
    x = make(Case("kda", (1,) * 2, key_dim=16, value_dim=32, gate="softplus"))
    base = (x.A_log, x.dt_bias, x.q, x.k, x.v, x.g, x.beta)
    with pytest.raises(ValueError, match="State layout mismatch"):
        cula.kda.kda_decode(*base, x.initial_state.mT.contiguous(), None)
    with pytest.raises(AssertionError, match="scale"):
        cula.kda.kda_decode(*base, x.initial_state, None, scale=0.0)
    o = cula.kda.kda_decode(*base, None, None)
    assert o.isfinite().all()
