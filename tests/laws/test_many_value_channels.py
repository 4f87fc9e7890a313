# SPDX-License-Identifier: Apache-2.0
"""More value channels than a kernel takes: the bits of calls for 256 at a time, whatever else is asked
for."""

from __future__ import annotations

import pytest
import torch

from cula_testing import passes
from cula_testing.cases import DELTA, Case, make
from cula_testing.compare import assert_same_bits
from cula_testing.kinds import KINDS, Call, ready

STATES = ("initial_state", "final_state", "checkpoints", "chunk_states", "snapshots", "b")


def value_channels(call: Call, first: int, count: int) -> Call:
    """The call for some of its value channels, on copies of what it touches."""

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in ("v", "o") or (name == "beta" and tensor.ndim == 4):
            tensor = tensor.narrow(-1, first, count)
        if name in STATES:
            tensor = tensor.narrow(-2, first, count)
        return tensor.clone()

    taken = {name: take(name, tensor) for name, tensor in call.tensors.items()}
    tensors = {name: tensor for name, tensor in taken.items() if hasattr(call.inputs, name)}
    inputs = call.inputs.but(case=call.inputs.case.but(value_dim=count), **tensors)
    return Call(call.kind, inputs, {name: taken.get(name, value) for name, value in call.named.items()})


@pytest.mark.parametrize(("value_dim", "beta_per_value"), [(300, False), (513, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_many_values_are_calls_for_256_at_a_time(algorithm, kind, value_dim, beta_per_value):
    beta_per_value = beta_per_value and algorithm in DELTA and kind != "segment"
    call = ready(kind, algorithm, value_dim=value_dim, beta_per_value=beta_per_value)
    parts = [value_channels(call, first, min(256, value_dim - first)) for first in range(0, value_dim, 256)]
    for each in (call, *parts):
        each()
    for name, tensor in call.results().items():
        found = [part.results()[name] for part in parts]
        if name == "m":
            assert_same_bits(name, tensor, found[0])
        else:
            assert_same_bits(name, tensor, torch.cat(found, dim=-1 if name == "o" else -2))


def test_many_values_keep_the_rule(algorithm):
    """As a retention layer of FLA's has them."""
    case = Case(algorithm, (130, 0, 65), packed=True, heads=1, value_heads=1, key_dim=256, value_dim=512)
    passes.assert_rule(lambda inputs, backend: passes.prefill(inputs, backend=backend), make(case))
