# SPDX-License-Identifier: Apache-2.0
"""Hybrid models of transformers on a GPU: with `cula.integrations.transformers` they give what transformers'
own PyTorch gives, and generate the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cula.integrations import transformers as adapter
from cula_testing.hybrids import LAYERS, a_model, cached, model_file, prompts

NAMES = {
    "qwen3_next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kimi_linear": ("chunk_kda", "fused_recurrent_kda"),
}
LINEAR = LAYERS.count("linear_attention")
# Heads as those of the published models have them, whose prefill goes in chunks.
WIDE = {
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "kimi_linear": {"linear_head_dim": 128},
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model whose linear attention is plain PyTorch, also where FLA or `kernels` are installed; without
    the adapter before and after."""
    module = model_file(request.param)
    for function in {*adapter._ROLES} & {*vars(module)}:
        theirs = getattr(module, function)
        monkeypatch.setattr(module, function, getattr(theirs, "__wrapped__", theirs))
    adapter.calls.clear()
    yield request.param
    adapter.unregister()
    adapter.calls.clear()


def on_the_gpu(name: str, **settings: object) -> tuple[torch.nn.Module, torch.Tensor]:
    """With weights and prompts that do not depend on the device."""
    with torch.device("cpu"):
        model, tokens = a_model(name, **settings), prompts()
    return model.cuda(), tokens.cuda()


def counted(name: str) -> tuple[int, ...]:
    """The calls for prompts and for tokens, which were all cula's."""
    assert {outcome for function, outcome in adapter.calls if function in NAMES[name]} == {"cula"}
    return tuple(adapter.calls.get((function, "cula"), 0) for function in NAMES[name])


def test_generates_the_same_tokens(name):
    """In float32, from prompts of two lengths."""
    model, tokens = on_the_gpu(name)
    mask = torch.ones_like(tokens)
    mask[1, :30] = 0
    options = {"attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    wanted = model.generate(tokens, **options)
    adapter.register()
    assert torch.equal(model.generate(tokens, **options), wanted)
    assert counted(name) == (LINEAR, 15 * LINEAR)


def test_gives_the_logits(name):
    """Of prompts that continue from a cache, and of single tokens."""
    model, tokens = on_the_gpu(name)
    pieces = (40, 31, 1, 1, 1, 1)
    wanted = cached(model, tokens, *pieces)
    adapter.register()
    torch.testing.assert_close(cached(model, tokens, *pieces), wanted, rtol=0, atol=1e-5)
    assert counted(name) == (2 * LINEAR, 4 * LINEAR)


def test_has_the_gradients_of_every_parameter(name):
    model, tokens = on_the_gpu(name)
    found = []
    for register in (False, True):
        if register:
            adapter.register()
        model.train().zero_grad()
        model(tokens, use_cache=False, labels=tokens).loss.backward()
        found.append({each: x.grad.clone() for each, x in model.named_parameters() if x.grad is not None})
    assert counted(name) == (LINEAR, 0)
    wanted, ours = found
    assert ours.keys() == wanted.keys()
    for each, gradient in wanted.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(ours[each], gradient, rtol=0, atol=2e-7 + 1e-4 * largest, msg=each)


def test_runs_in_bfloat16(name):
    """With logits as near to those of float32 as transformers' own."""
    model, tokens = on_the_gpu(name, **WIDE[name])
    exact = cached(model, tokens, 71, 1, 1, 1, 1)
    model = model.bfloat16()
    theirs = cached(model, tokens, 71, 1, 1, 1, 1)
    adapter.register()
    ours = cached(model, tokens, 71, 1, 1, 1, 1)
    assert counted(name) == (LINEAR, 4 * LINEAR)
    assert ours.dtype == torch.bfloat16
    error, budget = ((x.float() - exact).square().mean().sqrt() for x in (ours, theirs))
    assert error < 1.5 * budget + 1e-3
