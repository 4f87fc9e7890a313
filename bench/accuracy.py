# SPDX-License-Identifier: Apache-2.0
"""The error of a result against the float64 oracle, on as many heads as the oracle manages in a few
seconds."""

from __future__ import annotations

import torch

from cula.bench.training import Gradients, Step
from cula_testing import gradients, passes
from cula_testing.cases import Case, Inputs
from cula_testing.compare import errors

ORACLE_TOKEN_HEADS = 32768
ORACLE_STATES = 1024  # that calls start from: of a decode they are most of the work
HEAD_AXIS = {"A_log": 0, "decay": 0, "dt_bias": 0, "initial_state": 1}  # of the others it is 2


def _counts(case: Case) -> tuple[int, int]:
    """How many of the heads of q and k, and of v."""
    affordable = max(1, ORACLE_TOKEN_HEADS // max(1, sum(case.lengths)))
    if case.state:
        affordable = max(1, min(affordable, ORACLE_STATES // case.sequences))
    group = case.value_heads // case.heads
    heads = max(1, min(case.heads, affordable // group))
    return heads, heads * group


def _first_heads(case: Case, tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    heads, value_heads = _counts(case)
    return {
        name: x.narrow(HEAD_AXIS.get(name, 2), 0, heads if name in ("q", "k") else value_heads)
        for name, x in tensors.items()
        if x is not None and name != "cu_seqlens"
    }


def some_heads(inputs: Inputs) -> Inputs:
    """The same call on the first heads alone: heads do not know of each other."""
    heads, value_heads = _counts(inputs.case)
    cut = _first_heads(inputs.case, {**inputs.tensors(), "initial_state": inputs.initial_state})
    return inputs.but(case=inputs.case.but(heads=heads, value_heads=value_heads), **cut)


def stand_in(case: Case, tokens: int | None) -> Case:
    """The same call on sequences of at most so many tokens."""
    return case if tokens is None else case.but(lengths=tuple(min(length, tokens) for length in case.lengths))


class Oracle:
    """The exact result of a call. Make it before the call runs: decode overwrites its states."""

    def __init__(self, pass_name: str, inputs: Inputs) -> None:
        part = some_heads(inputs)
        self.value_heads = part.case.value_heads
        if part.initial_state_indices is not None:  # the rows' own states alone, which are far fewer
            rows = part.initial_state_indices.long()
            part = part.but(initial_state=part.initial_state[rows], initial_state_indices=None)
        call = passes.prefill if pass_name == "prefill" else passes.decode
        result = call(part.map(torch.Tensor.cpu).double(), backend="reference")
        self.o, self.state = result.o, result.final_state

    def errors(self, o: torch.Tensor, state: torch.Tensor | None) -> tuple[float, float | None]:
        """Relative root mean square errors of the output and of the final states [N, HV, V, K], if any."""
        heads = self.value_heads
        of_state = None if state is None else errors(state[:, :heads].cpu(), self.state).rms
        return errors(o[:, :, :heads].cpu(), self.o).rms, of_state


class GradientOracle:
    """The exact gradients of a step."""

    def __init__(self, inputs: Step) -> None:
        self.case = inputs.case
        part = some_heads(inputs).map(torch.Tensor.cpu)
        self.call = part.call()
        self.exact = gradients.exact(self.call, part.d_o, None)

    def errors(self, found: Gradients) -> dict[str, float]:
        """Relative root mean square errors, by the measure of the error rule."""
        return {
            name: errors(part.cpu(), self.exact[name], gradients.beside(self.call, self.exact, name)).rms
            for name, part in _first_heads(self.case, found).items()
        }
