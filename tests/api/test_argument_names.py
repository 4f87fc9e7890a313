# SPDX-License-Identifier: Apache-2.0
"""Errors name arguments as the function that was called has them, not as the operators below do."""

import inspect

import pytest
import torch

from cula import api, lightning
from cula.compat import vllm
from cula.integrations import _vllm_functions as vllm_functions
from cula.kda import fused_sigmoid_gating_delta_rule_update

N, H, K = 2, 4, 64


def states(slots=N, dtype=torch.float32, shape=(H, K, K)):
    return torch.zeros(slots, *shape, dtype=dtype)


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def tokens(count=1):
    q, k, v, g = (torch.randn(N, count, H, K) for _ in range(4))
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(N, count, H)}


POOL = {"initial_state_indices": i32(0, 1), "final_state_indices": i32(0, 1)}
EXPANDED = states(1).expand(N, H, K, K)


def raw_gates(count=1):
    x = tokens(count)
    return {
        **{name: x[name] for name in ("q", "k", "v")},
        "A_log": torch.zeros(H), "dt_bias": torch.zeros(H), "a": torch.zeros(N, count, H),
        "b": torch.zeros(N, count, H),
    }  # fmt: skip


OF_VLLM = {"ssm_state_indices": i32(0, 1)}
OF_SGLANG = {
    "softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_indices": i32(0, 1), "is_kda": False,
}  # fmt: skip
ROWS = {
    **{name: torch.randn(N, H, K) for name in ("q", "k", "v", "out")}, "softmax_scale": 1.0,
    "stride_q": 0, "stride_k": 0, "stride_v": 0, "stride_s": 0, "stride_o": 0, "s_offsets": None,
    "decay_scales": torch.zeros(H), "HEAD_DIM": K, "K_SPLIT_DIM": K, "V_SPLIT_DIM": K,
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "named", "wrong"),
    [
        (api.cula_decode, {"state": states(shape=(H, K, 32))}, "state"),
        (api.cula_decode, {"state": states(dtype=torch.float64)}, "state"),
        (api.cula_decode, {"state": states(dtype=torch.int8)}, "state"),
        (api.cula_decode, {"state": EXPANDED}, "state"),
        (api.cula_decode, {"state": states(), "state_indices": i32(0, 1, 1)}, "state_indices"),
        pytest.param(
            api.cula_decode, {"state": states(), "state_indices": i32(0, 7)}, "state_indices",
            marks=pytest.mark.cpu_only("the host reads no value"),
        ),
        (api.cula_decode, {"state": states(), "state_indices": [0, 1]}, "state_indices"),
        (api.cula_decode, {"state": states(), "out": torch.zeros(N, 1, H, 32)}, "out"),
        (api.cula_decode, {"state": states(), "out": "o"}, "out"),
        (api.cula_decode, {"state": states(), "k": torch.zeros(N, 1, H, 32)}, "k"),
        (api.cula_verify, {"state": states(shape=(H, K, 32))}, "state"),
        (api.cula_verify, {"state": EXPANDED, "state_indices": i32(0, 1)[:, None]}, "state"),
        (api.cula_verify, {"state": states(), "initial_state_indices": i32(0)}, "initial_state_indices"),
        (api.cula_verify, {"state": states(), "out": torch.zeros(N, 1, H, 32)}, "out"),
        (api.cula_kda, {"state_pool": states(shape=(H, K, 32)), **POOL}, "state_pool"),
        (api.cula_kda, {"state_pool": EXPANDED, **POOL}, "state_pool"),
        (api.cula_kda, {"state_pool": states(dtype=torch.int8), **POOL}, "state_pool"),
        (api.cula_kda, {"initial_state": states(shape=(H, K, 32))}, "initial_state"),
        (api.cula_kda, {"out": torch.zeros(N, 1, H, 32)}, "out"),
        (api.cula_kda, {"out": torch.zeros(1, 1, H, K).expand(N, 1, H, K)}, "out"),
        (vllm.fused_sigmoid_gating_delta_rule_update,
         {**OF_VLLM, "initial_state": states(shape=(H, K, 32))}, "initial_state"),
        (vllm.fused_sigmoid_gating_delta_rule_update,
         {"initial_state": states(), "ssm_state_indices": torch.zeros(N)}, "ssm_state_indices"),
        (vllm.fused_sigmoid_gating_delta_rule_update,
         {"initial_state": states(), "ssm_state_indices": torch.zeros(N, 1)}, "ssm_state_indices"),
        (fused_sigmoid_gating_delta_rule_update,
         {**OF_SGLANG, "initial_state_source": states(dtype=torch.int32)}, "initial_state_source"),
        (fused_sigmoid_gating_delta_rule_update,
         {**OF_SGLANG, "initial_state_source": EXPANDED}, "initial_state_source"),
        (vllm_functions.chunk_gated_delta_rule,
         {"g": torch.zeros(N, 1, H), "core_attn_out": torch.zeros(N, 1, H, K).half()}, "core_attn_out"),
        (lightning.linear_attention_decode, {"s": states(dtype=torch.float64)}, "s"),
        (lightning.linear_attention_decode,
         {"s": states(), "out": torch.zeros(1, H, K).expand(N, H, K)}, "out"),
    ],
)  # fmt: skip
def test_errors_name_the_functions_own_arguments(function, named, wrong):
    parameters = inspect.signature(function).parameters
    usual = ROWS if "HEAD_DIM" in parameters else raw_gates() if "a" in parameters else tokens()
    given = {**usual, **named}
    with pytest.raises((TypeError, ValueError)) as raised:
        function(**{name: value for name, value in given.items() if name in parameters})
    sentence = str(raised.value)
    assert sentence.split(": ")[-1].split()[0] == wrong, sentence
    assert wrong in parameters
