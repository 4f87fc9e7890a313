# SPDX-License-Identifier: Apache-2.0
"""python -m bench.hybrids: hybrid models of transformers on a CPU, with cula and without.

Random models of one period of the published ones, three linear layers and one of full attention, hidden
size 1024, heads of 128: a prompt of 2048 tokens, and the tokens behind it one by one. Both sides run in one
process, in turns, and the best of their times counts: other programs only ever add to it. Beside them stands
how long PyTorch's matrix products alone take of a call with cula, which are the same work on both sides, and
how long cula's own operators take: the rest is transformers and PyTorch, on both sides.

Written to bench/results/<device>/transformers.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import profile

from bench.machine import commit, file_safe, source_hash
from bench.results import RESULTS
from cula import build_info
from cula.bench import cpu
from cula.bench.measure import significant
from cula.integrations import transformers as adapter

LAYERS = ["linear_attention"] * 3 + ["full_attention"]
COMMON = {
    "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS, "num_attention_heads": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}

# model: (the class, the configuration's, its settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **COMMON, **EXPERTS, "num_local_experts": 4, "num_key_value_heads": 8, "kv_lora_rank": 256,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "linear_head_dim": 128,
            "linear_num_heads": 8,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **COMMON, **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 256,
            "num_key_value_heads": 2, "head_dim": 128, "linear_num_value_heads": 16,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {**COMMON, **DELTA, "num_key_value_heads": 8, "linear_num_value_heads": 8},
    ),
}  # fmt: skip
PROMPT = 2048
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
OPERATORS = f"{build_info().namespace}_unchecked::"

Step = Callable[[], object]


def a_model(name: str) -> torch.nn.Module:
    model_class, config_class, settings = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    return getattr(module, model_class)(getattr(transformers, config_class)(**settings)).bfloat16().eval()


def in_turns(sides: dict[str, Step], turns: int) -> dict[str, float]:
    """The best time of each, in milliseconds, after one run that is not measured."""
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(turns + 1):
        for side, step in sides.items():
            adapter.register() if side == "cula" else adapter.unregister()
            start = time.perf_counter()
            step()
            if turn:
                best[side] = min(best[side], 1e3 * (time.perf_counter() - start))
    return best


def parts_ms(step: Step, turns: int) -> tuple[float, float]:
    """Of a call with cula: the time within PyTorch's matrix products, and within cula's operators, each the
    least of all."""
    adapter.register()
    products, own = [], []
    for _ in range(turns):
        with profile() as profiled:
            step()
        rows = profiled.key_averages()
        products.append(sum(row.self_cpu_time_total for row in rows if row.key in PRODUCTS) / 1e3)
        own.append(sum(row.self_cpu_time_total for row in rows if row.key.startswith(OPERATORS)) / 1e3)
    return min(products), min(own)


class Conversation:
    """A prompt, and the tokens behind it, with a cache of its own."""

    def __init__(self, model: torch.nn.Module, prompt: torch.Tensor) -> None:
        self.model, self.prompt = model, prompt
        self.cache: object = None
        self.logits = torch.empty(0)

    def start(self) -> None:
        made = self.model(self.prompt, use_cache=True, logits_to_keep=1)
        self.cache, self.logits = made.past_key_values, made.logits

    def go_on(self) -> None:
        made = self.model(self.prompt[:, -1:], past_key_values=self.cache, use_cache=True)
        self.logits = made.logits


@torch.no_grad()
def measure(name: str, turns: int) -> list[dict[str, object]]:
    """The rows of one model: its prompt, its next token."""
    model = a_model(name)
    prompt = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    talks = {side: Conversation(model, prompt) for side in ("transformers", "cula")}
    rows: list[dict[str, object]] = []
    for what, passes in (("prefill", 1), ("decode", 8)):
        step = "start" if what == "prefill" else "go_on"
        times = in_turns({side: getattr(talk, step) for side, talk in talks.items()}, turns * passes)
        theirs, ours = (talks[side].logits.float() for side in ("transformers", "cula"))
        products, own = parts_ms(getattr(talks["cula"], step), turns)
        rows.append(
            {
                "model": name,
                "call": what,
                "tokens": PROMPT if what == "prefill" else 1,
                "transformers_ms": times["transformers"],
                "cula_ms": times["cula"],
                "products_ms": products,
                "own_ms": own,
                "difference": float((ours - theirs).norm() / theirs.norm()),
            }
        )
        theirs_ms, ours_ms = times["transformers"], times["cula"]
        print(
            f"{name:12} {what:8} transformers {theirs_ms:9.2f} ms   cula {ours_ms:9.2f} ms   "
            f"{theirs_ms / ours_ms:5.2f} x   products {products:9.2f} ms   own {own:8.2f} ms"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hybrids", description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="only these; nothing is written")
    parser.add_argument("--turns", type=int, default=12, help="of each side (default %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder of the results")
    options = parser.parse_args()
    cpu.prepare()
    torch.set_flush_denormal(False)  # as a user's process has it
    rows = [row for name in options.model or MODELS for row in measure(name, options.turns)]
    if options.model:
        return
    head = {
        "device": cpu.name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "source_hash": source_hash("src", "include", "bindings", "python"),
        "product_tflops": significant(cpu.gemm_tflops()),
        "load": os.getloadavg()[0],
        "turns": options.turns,
        "models": {name: settings for name, (_, _, settings) in MODELS.items()},
    }
    path = options.output / file_safe(cpu.name()) / "transformers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "cases": rows}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
