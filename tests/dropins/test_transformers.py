# SPDX-License-Identifier: Apache-2.0
"""The hybrid models of transformers on the drop-ins: what a user meets who replaces the functions their files
call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cula

transformers = pytest.importorskip("transformers")
PINNED = re.search(
    r"^transformers==(\S+)", (Path(__file__).parents[2] / "requirements-dev.txt").read_text(), re.M
)[1]
pytestmark = pytest.mark.cpu_only("the reference is transformers' own code in float32")

GDN = {
    "torch_chunk_gated_delta_rule": cula.gdn.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": cula.gdn.fused_recurrent_gated_delta_rule,
}
KDA = {
    "chunk_kimi_delta_attention": cula.kda.chunk_kda,
    "recurrent_kimi_delta_attention": cula.kda.fused_recurrent_kda,
}
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": LAYERS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# model: (its class, its configuration, the settings, what its file calls)
MODELS = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**COMMON, **LINEAR, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
        GDN,
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**COMMON, **LINEAR, "head_dim": 16}, GDN),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        KDA,
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**COMMON, **LINEAR}, GDN),
}


def older(version: str) -> bool:
    """Than the pinned one, in which every class and function is: with that or a newer one, a missing one is a
    fault."""
    one, other = (tuple(int(part) for part in re.findall(r"\d+", each)[:3]) for each in (version, PINNED))
    return one < other


def a_model(name: str) -> tuple[torch.nn.Module, object, dict[str, Callable]]:
    model_class, config_class, settings, functions = MODELS[name]
    if older(transformers.__version__) and importlib.util.find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"transformers {transformers.__version__}, older than {PINNED}, has no {name}")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if older(transformers.__version__) and not hasattr(module, model_class):
        pytest.skip(f"transformers {transformers.__version__}, older than {PINNED}, has no {model_class}")
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    return getattr(module, model_class)(config).float().eval(), module, functions


def counted(function: Callable, calls: Counter) -> Callable:
    """transformers hands a kernel the arguments that it has in its signature, and so does this."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **{name: value for name, value in kwargs.items() if name in parameters})

    return call


@torch.no_grad()
def logits(
    model: torch.nn.Module, prompts: torch.Tensor, prompt_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a whole prompt, and of its tokens from `prompt_tokens` on, one by one from the cache."""
    whole = model(prompts, use_cache=False).logits
    first = model(prompts[:, :prompt_tokens], use_cache=True)
    steps, cache = [first.logits], first.past_key_values
    for t in range(prompt_tokens, prompts.shape[1]):
        step = model(prompts[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        steps.append(step.logits)
    return whole, torch.cat(steps, dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_on_the_drop_ins(name, monkeypatch):
    model, module, functions = a_model(name)
    prompts = torch.randint(3, 97, (2, 75))
    wanted = logits(model, prompts, 70)
    calls = Counter()
    for attribute, function in functions.items():
        monkeypatch.setattr(module, attribute, counted(function, calls))
    found = logits(model, prompts, 70)
    linear = LAYERS.count("linear_attention")
    chunked, recurrent = (function.__name__ for function in functions.values())
    assert calls == {chunked: 2 * linear, recurrent: 5 * linear}
    for one, other in zip(wanted, found, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_the_drop_ins(name, monkeypatch):
    """With the gradients that transformers' own code has."""
    model, module, functions = a_model(name)
    prompts, calls, results = torch.randint(3, 97, (2, 75)), Counter(), []
    for patched in (False, True):
        for attribute, function in functions.items() if patched else ():
            monkeypatch.setattr(module, attribute, counted(function, calls))
        model.zero_grad()
        model(prompts, use_cache=False, labels=prompts).loss.backward()
        results.append({each: x.grad for each, x in model.named_parameters() if x.grad is not None})
    assert calls == {next(iter(functions.values())).__name__: LAYERS.count("linear_attention")}
    wanted, found = results
    assert wanted.keys() == found.keys()
    for each, gradient in wanted.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[each], gradient, rtol=0, atol=2e-7 + 1e-4 * largest, msg=each)
    assert any(x.any() for each, x in found.items() if "A_log" in each)
