# SPDX-License-Identifier: Apache-2.0
"""The ops of `torch.ops.cula` on a case's inputs. Outputs are filled with NaN first, so what is not written
shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

import cula
from cula_testing import device, judges, operators
from cula_testing.cases import Case, Inputs, state_like
from cula_testing.compare import assert_accurate

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
    return state_like(_state_case(inputs), count, device=inputs.q.device)


def empty_o(inputs: Inputs) -> torch.Tensor:
    return torch.full(inputs.o_shape, NAN, dtype=inputs.v.dtype, device=inputs.v.device)


def own_slots(inputs: Inputs) -> torch.Tensor:
    """Sequence n in slot n."""
    return torch.arange(inputs.case.sequences, dtype=torch.int32, device=inputs.q.device)


def backend_of(inputs: Inputs, pass_name: str) -> str:
    """The case's target, or the best where that has no kernel for the pass on the device of the inputs."""
    target = inputs.case.backend
    return target if target and device.serves(target, pass_name, inputs.q.device.type) else ""


def call(pass_name: str, backend: str, outputs: Mapping[str, torch.Tensor], **named) -> None:
    """The op."""
    named |= {**outputs, "backend": backend}
    if backend.startswith("reference"):
        judges.call(pass_name, outputs, named)
    else:
        operators.call(pass_name, **named)


def _call(pass_name: str, inputs: Inputs, backend: str, **named) -> None:
    outputs = {name: named[name] for name in Result.__dataclass_fields__ if named.get(name) is not None}
    named |= {**inputs.tensors(), **inputs.case.options}
    call(pass_name, backend or backend_of(inputs, pass_name), outputs, **named)


def _states(inputs: Inputs, final_state, final_state_indices, in_place: bool) -> dict:
    named = inputs.states()
    if in_place:
        final_state, named["initial_state"] = named["initial_state"], None
    return {
        **named,
        "final_state": final_state,
        "final_state_indices": final_state_indices,
        "in_place": in_place,
    }


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
    saved: torch.Tensor | None = None,
) -> Result:
    o = empty_o(inputs) if o is None else o
    if not in_place and final_state is None:
        final_state = empty_states(inputs, inputs.case.sequences)
        if inputs.initial_state_indices is not None:
            final_state_indices = own_slots(inputs)
    states = _states(inputs, final_state, final_state_indices, in_place)
    _call(
        "prefill",
        inputs,
        backend,
        **states,
        o=o,
        checkpoints=checkpoints,
        checkpoint_plan=checkpoint_plan,
        chunk_states=chunk_states,
        chunk_tokens=chunk_tokens,
        batch_invariant=batch_invariant,
        null_index=null_index,
        saved=saved,
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
            final_state_indices = own_slots(inputs)
    states = _states(inputs, final_state, final_state_indices, in_place)
    _call("decode", inputs, backend, **states, o=o, batch_invariant=batch_invariant, null_index=null_index)
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
    _call(
        "verify",
        inputs,
        backend,
        **states,
        o=o,
        state_indices=state_indices,
        num_accepted=num_accepted,
        snapshots=snapshots,
        snapshot_indices=snapshot_indices,
        parents=parents,
        batch_invariant=batch_invariant,
        null_index=null_index,
    )
    return Result(o=o, final_state=states["final_state"], snapshots=snapshots)


def empty_map(inputs: Inputs) -> dict[str, torch.Tensor]:
    """m and b of segment."""
    case = inputs.case
    N, HV, K, V = case.sequences, inputs.v.shape[2], inputs.q.shape[3], inputs.v.shape[3]
    dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    diagonal = cula.algorithms()[case.algorithm].has_diagonal_map
    shape = (N, HV, K) if diagonal else (N, HV, K, K)
    m, b = (torch.full(size, NAN, dtype=dtype, device=inputs.q.device) for size in (shape, (N, HV, V, K)))
    return {"m": m, "b": b}


def segment(
    inputs: Inputs,
    *,
    backend: str = "",
    m: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> Result:
    if m is None:
        m, b = empty_map(inputs).values()
    _call("segment", inputs, backend, m=m, b=b, batch_invariant=batch_invariant, null_index=-1)
    return Result(m=m, b=b)


def three(call, inputs: Inputs, backend: str = "") -> tuple[Result, Result, Result]:
    """call(inputs, backend) as found, by the oracle on float64 copies, and by the naive recurrence."""
    found = call(inputs, backend)
    with judges.judging():
        return found, call(inputs.double(), "reference"), call(inputs, "reference:naive")


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
