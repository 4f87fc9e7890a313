# SPDX-License-Identifier: Apache-2.0
"""The error of a result against the float64 oracle, on as many heads as the oracle manages in about a
second."""

from __future__ import annotations

import torch

from cula_testing import passes
from cula_testing.cases import Case, Inputs
from cula_testing.compare import errors

ORACLE_TOKEN_HEADS = 32768


def some_heads(inputs: Inputs) -> Inputs:
    """The same call on the first heads alone: heads do not know of each other."""
    case = inputs.case
    affordable = max(1, ORACLE_TOKEN_HEADS // max(1, sum(case.lengths)))
    group = case.value_heads // case.heads
    heads = max(1, min(case.heads, affordable // group))
    head_axis = {"A_log": 0, "decay": 0, "dt_bias": 0, "initial_state": 1}
    changes = {}
    for name, tensor in {**inputs.tensors(), "initial_state": inputs.initial_state}.items():
        if tensor is not None and name != "cu_seqlens":
            count = heads if name in ("q", "k") else heads * group
            changes[name] = tensor.narrow(head_axis.get(name, 2), 0, count)
    return inputs.but(case=case.but(heads=heads, value_heads=heads * group), **changes)


def stand_in(case: Case, tokens: int | None) -> Case:
    """The same call on sequences of at most so many tokens."""
    return case if tokens is None else case.but(lengths=tuple(min(length, tokens) for length in case.lengths))


class Oracle:
    """The exact result of a call. Make it before the call runs: decode overwrites its states."""

    def __init__(self, pass_name: str, inputs: Inputs) -> None:
        part = some_heads(inputs)
        self.value_heads = part.case.value_heads
        call = passes.prefill if pass_name == "prefill" else passes.decode
        result = call(part.map(torch.Tensor.cpu).double(), backend="reference")
        self.o, self.state = result.o, result.final_state

    def errors(self, o: torch.Tensor, state: torch.Tensor) -> tuple[float, float]:
        """Relative root mean square errors of the output and of the final states [N, HV, V, K]."""
        heads = self.value_heads
        return errors(o[:, :, :heads].cpu(), self.o).rms, errors(state[:, :heads].cpu(), self.state).rms
