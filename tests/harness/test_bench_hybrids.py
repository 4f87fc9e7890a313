# SPDX-License-Identifier: Apache-2.0
"""The benchmark of hybrid models: both sides really run as they are called, and its table."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import hybrids  # noqa: E402  (once ROOT is on the path)

import hybrid_tables  # noqa: E402  (once ROOT is on the path)
from cula.bench import cpu  # noqa: E402  (once ROOT is on the path)

pytestmark = pytest.mark.cpu_only("about a CPU's benchmark")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Of the same layers, with fewer channels and tokens."""
    monkeypatch.setattr(hybrids, "PROMPT", 70)
    models = {}
    for name, (model, config, settings) in hybrids.MODELS.items():
        fewer = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        heads = {each: 2 for each in settings if "linear" in each and "heads" in each}
        models[name] = model, config, {**settings, **fewer, **heads}
    monkeypatch.setattr(hybrids, "MODELS", models)
    monkeypatch.setattr(cpu, "GEMM_SIZES", (64,))
    hybrids.adapter.calls.clear()
    yield
    hybrids.adapter.unregister()


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "olmo_hybrid"])
def test_a_model(name):
    prefill, decode = hybrids.measure(name, turns=1)
    assert (prefill["call"], decode["call"]) == ("prefill", "decode")
    for row in (prefill, decode):
        assert 0 < row["difference"] < 0.1
        assert min(row["cula_ms"], row["transformers_ms"], row["products_ms"], row["own_ms"]) > 0
    # Two turns and a profile of the prompt; nine turns and a profile of each token: none without cula.
    counts = {}
    for (function, outcome), count in hybrids.adapter.calls.items():
        assert outcome == "cula"
        counts[function] = count
    assert counts["causal_conv1d_fn"] == 3 * 3
    assert counts["causal_conv1d_update"] == 3 * (1 + 8 + 1)


def test_sides_take_turns(monkeypatch):
    """And the first run of each is not measured."""
    ran, clock = [], iter(range(100))
    monkeypatch.setattr(hybrids.adapter, "register", lambda: ran.append("register"))
    monkeypatch.setattr(hybrids.adapter, "unregister", lambda: ran.append("unregister"))
    monkeypatch.setattr(hybrids.time, "perf_counter", lambda: float(next(clock)))
    sides = {"transformers": lambda: ran.append("a"), "cula": lambda: ran.append("b")}
    best = hybrids.in_turns(sides, 2)
    assert ran == ["unregister", "a", "register", "b"] * 3
    assert best == {"transformers": 1000.0, "cula": 1000.0}


def test_the_file_and_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hybrids", "--turns", "1", "--output", str(tmp_path)])
    monkeypatch.setattr(hybrids, "MODELS", {"olmo_hybrid": hybrids.MODELS["olmo_hybrid"]})
    hybrids.main()
    (path,) = tmp_path.glob("*/transformers.json")
    result = json.loads(path.read_text())
    assert result["transformers"] == importlib.import_module("transformers").__version__
    assert result["torch"] == torch.__version__
    lines = hybrid_tables.of_result(result)
    assert result["source_hash"] in " ".join(lines)
    for row in result["cases"]:
        ratio = f"{row['transformers_ms'] / row['cula_ms']:.1f} x"
        assert any(f"| {row['model']} | {row['call']} |" in line and ratio in line for line in lines)


def test_some_models_are_not_recorded(tmp_path, monkeypatch, capsys):
    arguments = ["hybrids", "--turns", "1", "--output", str(tmp_path), "--model", "olmo_hybrid"]
    monkeypatch.setattr(sys, "argv", arguments)
    hybrids.main()
    assert "olmo_hybrid" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
