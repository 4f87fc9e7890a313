# SPDX-License-Identifier: Apache-2.0
"""Tiny random hybrid models of transformers, on a CPU in float32."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
PINNED = re.search(
    r"^transformers==(\S+)", (Path(__file__).parents[2] / "requirements-dev.txt").read_text(), re.M
)[1]

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
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# model: (its class, its configuration, the settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**COMMON, **LINEAR, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**COMMON, **LINEAR, "head_dim": 16}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**COMMON, **LINEAR}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **COMMON,
            **LATENT,
            **FEW_EXPERTS,
            "qk_rope_head_dim": 8,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        {
            "text_config": {
                **COMMON,
                **LATENT,
                "moe_intermediate_size": 32,
                "num_experts_per_tok": 2,
                "n_routed_experts": 4,
                "q_lora_rank": 16,
                "index_topk": 128,
                "index_head_dim": 16,
                "index_n_heads": 2,
                "hc_mult": 2,
                "linear_head_dim": 16,
                "linear_num_heads": 4,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 48,
                "projection_intermediate_size": 32,
            },
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 32},
    ),
}


def older(version: str) -> bool:
    """Than the pinned one, in which every class and function is: with that or a newer one, a missing one is a
    fault."""
    one, other = (tuple(int(part) for part in re.findall(r"\d+", each)[:3]) for each in (version, PINNED))
    return one < other


def model_file(name: str) -> ModuleType:
    if older(transformers.__version__) and importlib.util.find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"transformers {transformers.__version__}, older than {PINNED}, has no {name}")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def a_model(name: str, **settings: object) -> torch.nn.Module:
    """With the same weights in every call."""
    model_class, config_class, usual = MODELS[name]
    module = model_file(name)
    if older(transformers.__version__) and not hasattr(module, model_class):
        pytest.skip(f"transformers {transformers.__version__}, older than {PINNED}, has no {model_class}")
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**usual, **settings})
    return getattr(module, model_class)(config).float().eval()


def prompts(batch: int = 2, tokens: int = 75) -> torch.Tensor:
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def cached(model: torch.nn.Module, tokens: torch.Tensor, *pieces: int) -> torch.Tensor:
    """Logits of a prompt that goes through the cache in pieces."""
    cache, found = None, []
    for piece in tokens.split(pieces, dim=1):
        result = model(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        found.append(result.logits)
    return torch.cat(found, dim=1)


def operands(key_dim: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q, k and v of two packed sequences, 9 and 14 tokens long."""
    generator = torch.Generator().manual_seed(2)
    drawn = (torch.randn(1, 23, 2, key_dim, generator=generator) for _ in range(3))
    return tuple(torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in drawn)


def gates(per_channel: bool) -> dict[str, torch.Tensor]:
    q = operands()[0]
    return {"g": -q.abs() if per_channel else -q.abs().sum(-1), "beta": q.sum(-1).sigmoid()}


def linear_layer(name: str) -> torch.nn.Module:
    layer = a_model(name)
    layer = getattr(layer.model, "language_model", layer.model).layers[0]
    return getattr(layer, "linear_attn", None) or layer.self_attn
