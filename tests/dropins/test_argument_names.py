# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a tensor, FLA's functions name one of their own arguments."""

import importlib
import inspect
import re

import pytest
import torch

B, T, H, D = 2, 20, 2, 16
MODULES = (
    "delta_rule", "gated_delta_product", "gdn", "gdn2", "generalized_delta_rule", "gla", "kda", "linear_attn",
    "retention", "rwkv7", "simple_gla",
)  # fmt: skip
BY_CHANNEL = ("kda", "gdn2", "gla")  # whose g has a number per channel
FUNCTIONS = {
    f"{module}.{name}": getattr(importlib.import_module(f"cula.{module}"), name)
    for module in MODULES
    for name in importlib.import_module(f"cula.{module}").__all__
    if name.startswith(("chunk_", "fused_"))
}


def valid(module: str, function) -> dict[str, object]:
    """A call that the function takes, with every tensor of tokens and a state."""
    given: dict[str, object] = {}
    for name in inspect.signature(function).parameters:
        if name in ("q", "k", "v", "r", "w", "gk", "kk", "a", "b"):
            given[name] = -torch.rand(B, T, H, D)
        elif name == "g":
            given[name] = -torch.rand(B, T, H, *([D] if module in BY_CHANNEL else []))
        elif name == "beta":
            given[name] = torch.rand(B, T, H)
        elif name == "initial_state":
            given[name] = torch.zeros(B, H, D, D)
        elif name == "num_householder":
            given[name] = 1
    return given


def spoiled(x: torch.Tensor) -> dict[str, object]:
    return {
        "int32": x.to(torch.int32), "float8": x.to(torch.float8_e4m3fn), "narrower": x[..., :-1],
        "one more dimension": x[None], "a list": [0.0],
    }  # fmt: skip


del FUNCTIONS["kda.fused_sigmoid_gating_delta_rule_update"]  # tests/api/test_argument_names.py has it


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_name_an_argument_of_the_function(name):
    function, given = FUNCTIONS[name], valid(name.split(".")[0], FUNCTIONS[name])
    parameters = inspect.signature(function).parameters
    function(**given)
    refusals = []
    for argument, x in given.items():
        if not isinstance(x, torch.Tensor):
            continue
        for what, wrong in spoiled(x).items():
            try:
                function(**{**given, argument: wrong})
            except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
                refusals.append((argument, what, str(error)))
    assert len(refusals) >= 2 * len(given)
    for argument, what, sentence in refusals:
        first = re.findall(r"\w+", re.sub(r"^(\w+: )+", "", sentence))[0]
        assert first in parameters, f"{argument} {what}: {sentence}"
