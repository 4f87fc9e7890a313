# SPDX-License-Identifier: Apache-2.0
"""cula.integrations.transformers.kernel_mapping: models of transformers by the public API of `kernels`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from cula.integrations import transformers as adapter
from cula_testing.hybrids import gates, model_file, operands
from cula_testing.process import run_python

pytestmark = pytest.mark.cpu_only("the reference is transformers' own code in float32")

# tools/setup.sh puts `kernels` there, apart from the packages of the tests.
KERNELS = Path(__file__).parents[2] / ".venv" / "wheel"

# transformers' functions of each layer, by model file
FUNCTIONS = {
    "chunk_gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": ("qwen3_next", "torch_recurrent_gated_delta_rule"),
    "chunk_kda": ("kimi_linear", "chunk_kimi_delta_attention"),
    "fused_recurrent_kda": ("kimi_linear", "recurrent_kimi_delta_attention"),
}


def layer_and_function(name):
    model, function = FUNCTIONS[name]
    return adapter.kernel_mapping()[name]["cpu"].load(), getattr(model_file(model), function)


def test_names_and_devices():
    mapping = adapter.kernel_mapping()
    assert mapping.keys() == FUNCTIONS.keys()
    assert all(each.keys() == {"cpu", "cuda"} for each in mapping.values())
    assert {*adapter.kernel_mapping(["cuda"])["chunk_kda"]} == {"cuda"}
    with pytest.raises(ValueError, match="devices must be of cpu and cuda, got 'xpu'"):
        adapter.kernel_mapping(("cpu", "xpu"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_kernels_demands_of_a_layer(name):
    """No state, no members but the two flags, and the parameters of what it stands for."""
    layer, function = layer_and_function(name)
    assert layer.has_backward is layer.can_torch_compile is True
    assert layer.__init__ is torch.nn.Module.__init__
    assert {*dir(layer)} - {*dir(torch.nn.Module)} == {"has_backward", "can_torch_compile"}
    ours, theirs = (inspect.signature(each).parameters.values() for each in (layer().forward, function))
    assert [(each.name, each.kind) for each in ours] == [(each.name, each.kind) for each in theirs]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_layer_computes_what_its_function_does(name):
    layer, function = layer_and_function(name)
    options = {"initial_state": torch.randn(1, 2, 16, 16), "output_final_state": True}
    given = {**gates(name.endswith("kda")), **options}
    wanted, found = (each(*operands(), **given, use_qk_l2norm_in_kernel=True) for each in (function, layer()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_packed_sequences_are_refused_behind_that_convolution():
    layer, _ = layer_and_function("chunk_kda")
    lengths = torch.tensor([0, 9, 23])
    with pytest.raises(NotImplementedError, match="taken with seq_idx only"):
        layer()(*operands(), **gates(True), cu_seq_lens_q=lengths)


# A model as it is, one whose functions `kernels` replaced, and one that it gave them back.
PROGRAM = """
import logging
import sys

logging.disable(logging.WARNING)  # each layer that has no mapping has a line

import transformers.utils.import_utils as packages

assert "transformers.integrations.hub_kernels" not in sys.modules
packages.is_kernels_available = lambda *_: True  # of a later version than there is on the index

import kernels
import torch

from cula.integrations import transformers as adapter
from cula_testing.hybrids import a_model, cached, prompts

name, mode = sys.argv[1], kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
torch.set_num_threads(1)
model, runs = a_model(name), []
for mapping in ({}, adapter.kernel_mapping(), {}):
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device="cpu")
    functions = {}
    for module in model.modules():
        functions |= vars(module).get("_kernel_funcs", {})
    origins = {key: each.forward.__func__.__module__ for key, each in functions.items()}
    ours = {key for key, origin in origins.items() if origin == "cula._kernel_layers"}
    assert ours == functions.keys() & mapping.keys()
    assert len(ours) == (2 if mapping else 0)
    model.zero_grad()
    model(prompts(), use_cache=False, labels=prompts()).loss.backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    tokens = model.generate(prompts(tokens=20), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    runs.append([cached(model, prompts(), 40, 31, 1, 1, 1, 1), tokens, *gradients])
theirs, ours, again = runs
assert torch.equal(ours[1], theirs[1])
assert not torch.equal(ours[0], theirs[0])  # another order of sums: something else ran
torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)
for one, other in zip(ours[2:], theirs[2:], strict=True):
    torch.testing.assert_close(one, other, rtol=0, atol=2e-7 + 1e-4 * float(other.abs().max()))
assert all(torch.equal(one, other) for one, other in zip(again, theirs, strict=True))
assert not adapter.calls
print("as without it")
"""


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_models(name):
    """Through the hook that transformers has for `kernels`."""
    if not KERNELS.is_dir() and importlib.util.find_spec("kernels") is None:
        pytest.skip("the package kernels is not here: tools/setup.sh wheel installs it")
    path = ":".join([*filter(None, sys.path), str(KERNELS)])  # behind the packages of the tests
    assert run_python("-W", "ignore", "-c", PROGRAM, name, PYTHONPATH=path) == "as without it\n"
