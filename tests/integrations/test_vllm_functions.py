# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions of KDA and GDN, of every model that has them, replaced in a stand-in of vLLM: the numbers,
the states that are written, and the calls that go on to vLLM's own."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from cula.integrations import vllm
from cula_testing import engine_kernels
from cula_testing.compare import assert_same_bits, errors
from cula_testing.vllm_stand_in import GLM, HV, KIMI, OPERATORS, K

pytestmark = pytest.mark.usefixtures("engine")

BLOCKS = 24
KINDS = pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=["int32", "int64"])


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def kda_tokens(rows: int, heads: int = HV) -> dict[str, torch.Tensor]:
    draw = torch.Generator(torch.get_default_device()).manual_seed(9)
    shape = (1, rows, heads, K)
    q, k, v, g = (torch.randn(shape, generator=draw) for _ in range(4))
    return {
        "q": q, "k": k, "v": v, "raw_g": g, "raw_beta": torch.randn(1, rows, heads, generator=draw),
        "A_log": torch.rand(heads, generator=draw), "dt_bias": torch.rand(heads * K, generator=draw),
    }  # fmt: skip


def kda_pool() -> torch.Tensor:
    return (
        torch.randn(BLOCKS, HV, K, K, generator=torch.Generator(torch.get_default_device()).manual_seed(4))
        / 4
    )


def both(path: str, name: str, *given, **named) -> list[tuple[torch.Tensor, ...]]:
    """What vLLM's function returns, and what ours in its place does, with the tensors that were given."""
    vllm.unregister()
    vllm.calls.clear()
    module, results = importlib.import_module(path), []
    for ours in (False, True):
        if ours:
            vllm.register()
        own = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in named.items()}
        engine_kernels.ran.clear()
        o, state = getattr(module, name)(*given, **own)
        assert engine_kernels.ran == ([] if ours else [name])
        results.append(
            (o, state, *(own[key] for key in ("initial_state", "out", "final_state") if key in own))
        )
    assert vllm.calls[name, "cula"] == 1
    for one, two in zip(*results, strict=True):
        assert errors(two, one.double()).rms < 1e-6
    return results


KIMI_OPERATORS = f"{KIMI}.ops.third_party.kda"


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kimi_prefill(bound):
    x = kda_tokens(90)
    x["g_bias"] = x.pop("dt_bias")
    named = {**x, "initial_state": kda_pool()[:2], "output_final_state": True, "lower_bound": bound}
    both(
        KIMI_OPERATORS, "chunk_kda_with_fused_gate", **named, use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts([70, 20]),
    )  # fmt: skip


@KINDS
@pytest.mark.parametrize("bound", [None, -5.0])
def test_kimi_decode_and_verify(bound, kind):
    x, pool = kda_tokens(6), kda_pool()
    table = torch.tensor([[3, 4, 5], [6, 7, 8], [0, 0, 0]], dtype=kind)
    accepted = torch.tensor([2, 1, 1], dtype=kind)
    named = {**x, "lower_bound": bound, "initial_state": pool}
    room = torch.zeros_like(x["v"])
    one = both(
        KIMI_OPERATORS, "fused_recurrent_kda", **named, cu_seqlens=starts([3, 2, 1]),
        ssm_state_indices=table, num_accepted_tokens=accepted, out=room,
    )  # fmt: skip
    assert not one[1][0][0, 5].any()
    rows = torch.cat([named.pop(name).flatten(2)[0] for name in ("q", "k", "v")], 1)
    both(
        KIMI_OPERATORS, "fused_recurrent_kda_packed_decode", mixed_qkv=rows, **named,
        state_indices=torch.tensor([5, 0, 2, 9, 3, -1], dtype=kind),
    )  # fmt: skip


def test_kimi_k3_prefill():
    x = kda_tokens(90)
    x["g"], x["beta"] = x.pop("raw_g"), x.pop("raw_beta")
    named = {
        **x, "lower_bound": -5.0, "initial_state": kda_pool()[:2], "cu_seqlens": starts([70, 20]),
        "out": torch.zeros_like(x["v"]), "final_state": torch.zeros(2, HV, K, K), "workspace": torch.zeros(1),
    }  # fmt: skip
    both(f"{KIMI}.kda", "_flashkda_prefill", **named)
    kept = {"checkpoint_state": torch.zeros(2, HV, K, K), "checkpoint_offsets": torch.tensor([16, 0])}
    sys.modules[f"{KIMI}.kda"]._flashkda_prefill(**named, **kept)
    assert engine_kernels.ran == ["_flashkda_prefill"]
    [sentence] = [why for _, why in vllm.calls if why != "cula"]
    assert "multiples of 16 tokens" in sentence


@pytest.mark.parametrize(
    ("final_state", "words"),
    [
        (torch.zeros(1, HV, K, K), "final_state must have shape"),
        (torch.zeros(2, HV, K, K, dtype=torch.int32), "final_state must have dtype"),
        (None, "final_state must be a tensor, got NoneType"),
    ],
    ids=["shape", "dtype", "type"],
)
def test_a_final_state_of_kimi_k3_is_refused_before_anything_is_written(final_state, words, monkeypatch):
    x, given = kda_tokens(90), []
    x["g"], x["beta"] = x.pop("raw_g"), x.pop("raw_beta")
    named = {
        **x, "lower_bound": -5.0, "initial_state": kda_pool()[:2], "cu_seqlens": starts([70, 20]),
        "out": torch.zeros_like(x["v"]), "workspace": torch.zeros(1),
        "final_state": final_state if final_state is None else final_state.to(x["v"].device),
    }  # fmt: skip

    def theirs(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, out, final_state,
               workspace, checkpoint_state=None, checkpoint_offsets=None):  # fmt: skip
        given.append(locals())

    module = importlib.import_module(f"{KIMI}.kda")
    monkeypatch.setattr(module, "_flashkda_prefill", theirs)
    vllm.register()
    module._flashkda_prefill(**named)
    [call] = given
    assert call["final_state"] is named["final_state"]
    assert not named["out"].any()
    [(_, why)] = vllm.calls
    assert words in why


@pytest.mark.parametrize("safe", [False, True])
def test_glm_prefill(safe):
    x = kda_tokens(90)
    x["beta"], x["g_bias"] = x.pop("raw_beta").sigmoid(), x.pop("dt_bias")
    both(
        f"{GLM}.ops.third_party.kda", "chunk_kda_with_fused_gate", **x, initial_state=kda_pool()[:2],
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=starts([70, 20]), safe_gate=safe,
        lower_bound=-5.0,
    )  # fmt: skip


@pytest.mark.parametrize("raw", [False, True])
def test_glm_decode_and_verify(raw):
    x = kda_tokens(6)
    x["a_log"], x["g_bias"], x["beta"] = x.pop("A_log"), x.pop("dt_bias"), x.pop("raw_beta")
    g = x.pop("raw_g")
    named = {
        **x, "g": g if raw else -g.abs(), "initial_state": kda_pool(), "sigmoid_beta": True,
        "compute_gate": raw, "lower_bound": -5.0,
    }  # fmt: skip
    path = f"{GLM}.ops.third_party.kda"
    both(path, "fused_recurrent_kda", **named, cu_seqlens=starts([1] * 6),
         ssm_state_indices=torch.tensor([5, 0, 2, 9, 3, 4, 7]))  # fmt: skip
    both(path, "fused_recurrent_kda", **named, cu_seqlens=starts([3, 3]),
         ssm_state_indices=torch.arange(1, 7).view(2, 3),
         num_accepted_tokens=torch.tensor([1, 3]))  # fmt: skip


def test_functions_of_log_decays():
    """Those of OLMo-hybrid (GDN) and Bailing (KDA)."""
    x = kda_tokens(90)
    named = {name: x[name] for name in ("q", "k", "v")}
    named |= {"g": -x["raw_g"].abs(), "beta": x["raw_beta"].sigmoid()}
    more = {"use_qk_l2norm_in_kernel": True, "initial_state": kda_pool()[:2], "cu_seqlens": starts([70, 20])}
    both(f"{OPERATORS}.kda", "chunk_kda", **named, **more, output_final_state=True, safe_gate=True,
         lower_bound=-5.0)  # fmt: skip
    few = {name: value[:, :6] for name, value in named.items()}
    table = {"ssm_state_indices": torch.arange(1, 7), "cu_seqlens": starts([1] * 6)}
    both(f"{OPERATORS}.kda", "fused_recurrent_kda", **few, **table, initial_state=kda_pool(),
         use_qk_l2norm_in_kernel=True, safe_gate=False, lower_bound=None)  # fmt: skip
    table = {"ssm_state_indices": torch.arange(1, 7).view(2, 3), "cu_seqlens": starts([3, 3])}
    accepted = torch.tensor([3, 1])
    both(f"{OPERATORS}.kda", "fused_recurrent_kda_fwd", **few, **table, initial_state=kda_pool(), scale=0.1,
         num_accepted_tokens=accepted)  # fmt: skip
    few["g"] = few["g"][..., 0]
    both(OPERATORS, "fused_recurrent_gated_delta_rule", **few, **table, initial_state=kda_pool(),
         num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"inplace_final_state": False}, "inplace_final_state=False"),
        ({"beta": None}, "beta=None is not built"),
        ({"ssm_state_indices": None}, "a pool and ssm_state_indices are needed"),
        ({"num_accepted_tokens": torch.tensor([1, 1])}, "num_accepted_tokens must come with"),
        ({"ssm_state_indices": torch.zeros(6)}, "must have dtype int32 or int64"),
    ],
)
def test_declined(changed, words, monkeypatch):
    """vLLM's function gets the call as it was."""
    x = kda_tokens(6)
    named = {name: x[name] for name in ("q", "k", "v")}
    named |= {
        "g": -x["raw_g"].abs()[..., 0], "beta": x["raw_beta"], "cu_seqlens": starts([1] * 6),
        "initial_state": kda_pool(), "ssm_state_indices": torch.arange(6),
    }  # fmt: skip
    given = []

    def theirs(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
               cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
               use_qk_l2norm_in_kernel=False):  # fmt: skip
        given.append(locals())

    module = sys.modules[OPERATORS]
    monkeypatch.setattr(module, "fused_recurrent_gated_delta_rule", theirs)
    vllm.register()
    before = named["initial_state"].clone()
    module.fused_recurrent_gated_delta_rule(**{**named, **changed})
    [call] = given
    assert all(call[key] is value for key, value in {**named, **changed}.items())
    assert_same_bits("pool", before, named["initial_state"])
    [(_, why)] = vllm.calls
    assert words in why
