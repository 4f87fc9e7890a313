# SPDX-License-Identifier: Apache-2.0
"""The hybrid models of transformers on the drop-ins: what a user meets who replaces the functions their files
call."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import cula
from cula_testing.hybrids import LAYERS, a_model, model_file

pytestmark = pytest.mark.cpu_only("the reference is transformers' own code in float32")

GDN = {
    "torch_chunk_gated_delta_rule": cula.gdn.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": cula.gdn.fused_recurrent_gated_delta_rule,
}
KDA = {
    "chunk_kimi_delta_attention": cula.kda.chunk_kda,
    "recurrent_kimi_delta_attention": cula.kda.fused_recurrent_kda,
}
# model: what its file calls
CALLED = {"qwen3_next": GDN, "qwen3_5": GDN, "kimi_linear": KDA, "olmo_hybrid": GDN}


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


@pytest.mark.parametrize("name", CALLED)
def test_a_model_runs_on_the_drop_ins(name, monkeypatch):
    model, module, functions = a_model(name), model_file(name), CALLED[name]
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


@pytest.mark.parametrize("name", CALLED)
def test_a_model_trains_on_the_drop_ins(name, monkeypatch):
    """With the gradients that transformers' own code has."""
    model, module, functions = a_model(name), model_file(name), CALLED[name]
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
