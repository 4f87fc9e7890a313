# SPDX-License-Identifier: Apache-2.0
"""The ops of `torch.ops.cula` on a case's inputs. Outputs are filled with NaN first, so what is not written shows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import cula  # noqa: F401  (loads torch.ops.cula)
from cases import FAMILY, Case, Inputs, state_like
from compare import assert_accurate

NAN = float("nan")


@dataclass
class Result:
    o: torch.Tensor | None = None
    final_state: torch.Tensor | None = None
    checkpoints: torch.Tensor | None = None
    chunk_states: torch.Tensor | None = None
    snapshots: torch.Tensor | None = None
    m: torch.Tensor | None = None
    b: torch.Tensor | None = None

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in vars(self).items() if tensor is not None]


def _state_case(inputs: Inputs) -> Case:
    """The oracle, float64 in, keeps float64 states; everything else keeps the case's."""
    double = inputs.q.dtype == torch.float64
    return inputs.case.but(state_dtype=torch.float64) if double else inputs.case


def empty_states(inputs: Inputs, count: int) -> torch.Tensor:
    return state_like(_state_case(inputs), count)


def empty_o(inputs: Inputs) -> torch.Tensor:
    return torch.full(inputs.v.shape, NAN, dtype=inputs.v.dtype)


def _options(inputs: Inputs, backend: str, batch_invariant: bool, null_index: int) -> dict:
    own = {"backend": backend or inputs.case.backend, "batch_invariant": batch_invariant, "null_index": null_index}
    return {**inputs.case.options, **own}


def _states(inputs: Inputs, final_state, final_state_indices, in_place: bool) -> dict:
    named = inputs.states()
    if in_place:
        final_state, named["initial_state"] = named["initial_state"], None
    return {**named, "final_state": final_state, "final_state_indices": final_state_indices, "in_place": in_place}


def prefill(
    inputs: Inputs,
    *,
    backend: str = "",
    o: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,  # left out: dense, one per sequence, unless in_place
    final_state_indices: torch.Tensor | None = None,
    in_place: bool = False,
    checkpoints: torch.Tensor | None = None,
    checkpoint_plan: torch.Tensor | None = None,
    chunk_states: torch.Tensor | None = None,
    chunk_tokens: int = 64,
    batch_invariant: bool = False,
    null_index: int = -1,
) -> Result:
    o = empty_o(inputs) if o is None else o
    if not in_place and final_state is None:
        final_state = empty_states(inputs, inputs.case.sequences)
        if inputs.initial_state_indices is not None:
            final_state_indices = torch.arange(inputs.case.sequences, dtype=torch.int32)
    states = _states(inputs, final_state, final_state_indices, in_place)
    torch.ops.cula.prefill(
        **inputs.tensors(),
        **states,
        o=o,
        checkpoints=checkpoints,
        checkpoint_plan=checkpoint_plan,
        chunk_states=chunk_states,
        **_options(inputs, backend, batch_invariant, null_index),
        chunk_tokens=chunk_tokens,
    )
    return Result(o=o, final_state=states["final_state"], checkpoints=checkpoints, chunk_states=chunk_states)


def decode(
    inputs: Inputs,
    *,
    backend: str = "",
    o: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None,
    in_place: bool = False,
    batch_invariant: bool = False,
    null_index: int = -1,
) -> Result:
    o = empty_o(inputs) if o is None else o
    if not in_place and final_state is None:
        final_state = empty_states(inputs, inputs.case.sequences)
        if inputs.initial_state_indices is not None:
            final_state_indices = torch.arange(inputs.case.sequences, dtype=torch.int32)
    states = _states(inputs, final_state, final_state_indices, in_place)
    torch.ops.cula.decode(**inputs.tensors(), **states, o=o, **_options(inputs, backend, batch_invariant, null_index))
    return Result(o=o, final_state=states["final_state"])


def verify(
    inputs: Inputs,
    *,
    backend: str = "",
    o: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,  # left out: the base is only read
    in_place: bool = False,
    state_indices: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    snapshots: torch.Tensor | None = None,
    snapshot_indices: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    batch_invariant: bool = False,
    null_index: int = -1,
) -> Result:
    o = empty_o(inputs) if o is None else o
    states = _states(inputs, final_state, None, in_place)
    torch.ops.cula.verify(
        **inputs.tensors(),
        **states,
        o=o,
        state_indices=state_indices,
        num_accepted=num_accepted,
        snapshots=snapshots,
        snapshot_indices=snapshot_indices,
        parents=parents,
        **_options(inputs, backend, batch_invariant, null_index),
    )
    return Result(o=o, final_state=states["final_state"], snapshots=snapshots)


def segment(inputs: Inputs, *, backend: str = "", batch_invariant: bool = False) -> Result:
    case = inputs.case
    N, HV, K, V = case.sequences, inputs.v.shape[2], inputs.q.shape[3], inputs.v.shape[3]
    dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    shape = (N, HV, K, K) if FAMILY[case.algorithm][1] == "delta" else (N, HV, K)
    m, b = torch.full(shape, NAN, dtype=dtype), torch.full((N, HV, V, K), NAN, dtype=dtype)
    torch.ops.cula.segment(**inputs.tensors(), m=m, b=b, **_options(inputs, backend, batch_invariant, -1))
    return Result(m=m, b=b)


def three(call, inputs: Inputs, backend: str = "") -> tuple[Result, Result, Result]:
    """call(inputs, backend) as found, by the oracle on float64 copies, and by the naive recurrence."""
    return call(inputs, backend), call(inputs.double(), "reference"), call(inputs, "reference:naive")


def assert_rule(call, inputs: Inputs, backend: str = "") -> Result:
    """The error rule on everything that a call returns."""
    found, oracle, naive = three(call, inputs, backend)
    for name, tensor in found.items():
        # A map M S + B is only ever as exact as what it is added to, and it starts as the identity.
        identity = {3: torch.ones(1), 4: torch.eye(tensor.shape[-1])}[tensor.ndim] if name == "m" else None
        assert_accurate(name, tensor, getattr(oracle, name), getattr(naive, name), inputs.q.dtype, identity)
    return found


def skip_if_declined(call, inputs: Inputs, backend: str) -> None:
    """Skips the test with the registry's sentence where the backend does not take the call."""
    try:
        call(inputs, backend)
    except ValueError as declined:
        if "does not take this call" not in str(declined):
            raise
        pytest.skip(str(declined))
