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
BY_CHANNEL = {"kda.g", "gdn2.g", "gla.g", "gdn2.b", "gdn2.w"}
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
        if name in ("q", "k", "v", "r", "w", "gk", "kk", "a", "b", "erase"):
            given[name] = -torch.rand(B, T, H, D)
        elif name == "g":
            given[name] = -torch.rand(B, T, H, *([D] if f"{module}.g" in BY_CHANNEL else []))
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


# Those that need more than tokens and a state are tested by name elsewhere.
TESTED = {
    name: function
    for name, function in FUNCTIONS.items()
    if not {"A_log", "initial_state_indices", "cache_indices"}
    & {
        each
        for each, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
}


def test_most_functions_are_tested():
    assert len(TESTED) >= 20


@pytest.mark.parametrize("name", TESTED)
def test_errors_name_an_argument_of_the_function(name):
    function, given = TESTED[name], valid(name.split(".")[0], TESTED[name])
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
