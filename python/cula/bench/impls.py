# SPDX-License-Identifier: Apache-2.0
"""What is measured on every machine: this library by way of its public Python functions, two versions in
plain PyTorch, and a copy of the states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from .. import algorithms, api
from . import cost, eager, training
from .cases import TRAINING_PASSES, Case, Inputs, Maybe, make, state_like
from .measure import Call
from .training import Forward, Step

# Binds one set of inputs: the call returns o and the states, the pool that it was given or dense ones
# [N, HV, V, K]; of a pass of training the gradients, see cula.bench.training.
Bind = Callable[[str, Inputs], Call]

ROTATE_BYTES_LIMIT = 1 << 30  # of all sets of inputs together
READ_AT_ONCE = 2048  # elements of states that one sum is of: several loads in flight for every thread

MODES = {row.name: row.mode for row in algorithms().values()}
PREFILL = {name: getattr(api, f"cula_{mode}") for name, mode in MODES.items()}


def _as_they_are(_pass_name: str, inputs: Inputs) -> Inputs:
    return inputs


@dataclass(frozen=True)
class Impl:
    name: str
    bind: Bind
    takes: Callable[[str, Case], bool]  # pass and case
    moves: Callable[[Case], int] | None = None  # bytes of states, and nothing else; None: it computes
    # What it leaves to others, done to the inputs before they are bound and before the clock starts.
    prepare: Callable[[str, Inputs], Inputs] = _as_they_are

    @property
    def computes(self) -> bool:
        return self.moves is None

    def bound(self, pass_name: str, inputs: Inputs) -> Call:
        return self.bind(pass_name, self.prepare(pass_name, inputs))

    def gradients(self, pass_name: str, inputs: Step) -> training.Gradients:
        """Of the inputs as they are before they are prepared."""
        return training.found(partial(self.bind, pass_name), partial(self.prepare, pass_name), inputs)


def keywords(inputs: Inputs) -> dict[str, Any]:
    """What the kernel does itself, in the words of FLA's functions and ours; what the algorithm lacks is left
    out."""
    case = inputs.case
    named = {
        "use_gate_in_kernel": case.gate != "log_decay",
        "lower_bound": case.lower_bound if case.gate == "bounded" else None,
        "A_log": inputs.A_log,
        "dt_bias": inputs.dt_bias,
        "use_beta_sigmoid_in_kernel": case.beta_is_logit,
        "use_qk_l2norm_in_kernel": case.qk_l2norm,
    }
    return {name: value for name, value in named.items() if value is not None and value is not False}


def _named(inputs: Inputs, backend: str | None) -> dict[str, Any]:
    named = ("g", "beta", "erase", "a_key", "b_key", "decay")
    gates = {name: x for name in named if (x := getattr(inputs, name)) is not None}
    return {**gates, **keywords(inputs), "scale": inputs.case.scale, "backend": backend}


def _cula_forward(op: str, backend: str | None, options: dict[str, bool]) -> Forward:
    def forward(inputs: Inputs) -> torch.Tensor:
        named = {**_named(inputs, backend), **options}
        return PREFILL[op](inputs.q, inputs.k, inputs.v, **named, cu_seqlens=inputs.cu_seqlens)[0]

    return forward


def cula_bind(backend: str | None, **of_training: bool) -> Bind:
    """of_training: options of the function where both directions, or the second, are measured."""

    def bind(pass_name: str, inputs: Inputs) -> Call:
        q, k, v, op = inputs.q, inputs.k, inputs.v, inputs.case.algorithm
        if pass_name in TRAINING_PASSES:
            return training.bind(pass_name, inputs, _cula_forward(op, backend, of_training))
        more = _named(inputs, backend)
        # A serving engine owns its output. On a CPU a new one above 32 MiB would come as fresh pages in every
        # call; their first touch costs the system more than the kernel takes to fill them.
        more["out"] = v.new_empty(inputs.o_shape)
        if pass_name == "prefill":
            return lambda: PREFILL[op](q, k, v, **more, output_final_state=True, cu_seqlens=inputs.cu_seqlens)
        pool, rows = inputs.initial_state, inputs.initial_state_indices
        if pass_name == "decode":
            return lambda: api.cula_decode(q, k, v, pool, mode=MODES[op], state_indices=rows, **more)
        slots = None if inputs.case.reads_only else verify_slots(inputs)
        return lambda: api.cula_verify(
            q, k, v, pool, mode=MODES[op], state_indices=slots, initial_state_indices=rows, **more
        )

    return bind


def inputs_of(pass_name: str, case: Case, device: str) -> Inputs:
    inputs = make(case, device, draw_on=device)
    if pass_name in TRAINING_PASSES:
        return training.step_inputs(inputs)
    return verify_inputs(inputs) if pass_name == "verify" else inputs


def rotating(pass_name: str, device: ModuleType, first_set: Inputs) -> list[Inputs]:
    """Copies of one case's inputs, as many as outgrow the caches (within ROTATE_BYTES_LIMIT), at least one.
    `device` is cula.bench.cpu or cula.bench.gpu."""
    size = cost.moved_bytes(pass_name, first_set)
    wanted = min(device.CACHE_FACTOR * device.last_level_cache_bytes(), ROTATE_BYTES_LIMIT)
    return [first_set, *(first_set.map(torch.clone) for _ in range(math.ceil(wanted / size) - 1))]


def verify_inputs(inputs: Inputs) -> Inputs:
    """The same rows over a pool in which each row's slot is followed by one for each of its draft tokens that
    keeps its state."""
    case, device = inputs.case, inputs.q.device
    if case.reads_only:
        return inputs
    stride = 1 + case.lengths[0]
    pool = state_like(case, case.sequences * stride, fill=0.0, device=device)
    own = torch.arange(case.sequences, dtype=torch.int32, device=device) * stride
    pool[own.long()] = inputs.initial_state[inputs.initial_state_indices.long()]
    return inputs.but(initial_state=pool, initial_state_indices=own)


def verify_slots(inputs: Inputs) -> torch.Tensor:
    """[N, S]: the slots that take the states after each draft token."""
    drafts = torch.arange(1, 1 + inputs.case.lengths[0], dtype=torch.int32, device=inputs.q.device)
    return inputs.initial_state_indices[:, None] + drafts


def states_of(pass_name: str, inputs: Inputs, states: Maybe) -> Maybe:
    """The final states [N, HV, V, K] from what a bound call returned, or None if it keeps none."""
    if pass_name == "verify" and inputs.case.reads_only:
        return None
    if states is not inputs.initial_state:
        return states
    rows = verify_slots(inputs)[:, -1] if pass_name == "verify" else inputs.initial_state_indices
    return states[rows.long()]


def _eager(form: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Bind:
    def bind(pass_name: str, inputs: Inputs) -> Call:
        if pass_name in TRAINING_PASSES:
            return training.bind(pass_name, inputs, lambda given: form(given)[0])
        if pass_name == "prefill":
            return lambda: form(inputs)
        pool, rows = inputs.initial_state, inputs.initial_state_indices.long()

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            o, pool[rows] = form(inputs, pool[rows])
            return o, pool

        return step

    return bind


def _states_read(inputs: Inputs) -> torch.Tensor:
    """[N, HV, V, K], contiguous"""
    states: torch.Tensor = inputs.initial_state[inputs.initial_state_indices.long()]
    return states.contiguous()


def _copy_state(_pass_name: str, inputs: Inputs) -> Call:
    """One plain copy of the states that the call reads: the floor of a decode."""
    source = _states_read(inputs)
    target = source.clone()
    return lambda: target.copy_(source)


def _copy_drafts(_pass_name: str, inputs: Inputs) -> Call:
    """One plain copy of each state to every draft token's place: the floor of a verification that keeps
    states."""
    source = _states_read(inputs)[:, None]
    target = source.new_empty(source.shape[0], inputs.case.lengths[0], *source.shape[2:])
    return lambda: target.copy_(source)


def _read_state(_pass_name: str, inputs: Inputs) -> Call:
    """The sums of parts of the states, some KiB each: the floor of a verification that keeps none."""
    parts = _states_read(inputs).view(-1, READ_AT_ONCE)
    sums = parts.new_empty(parts.shape[0])
    return lambda: torch.sum(parts, -1, out=sums)


OURS = Impl("cula", cula_bind(None), lambda _pass, _case: True)
EAGER_CHUNK = Impl(
    "eager_chunk", _eager(eager.chunk_form), lambda p, _case: p in ("prefill", *TRAINING_PASSES)
)
EAGER_RECURRENT = Impl(
    "eager_recurrent", _eager(eager.recurrence), lambda p, _case: p in ("prefill", "decode")
)
COPY_STATE = Impl(
    "copy_state",
    _copy_state,
    lambda p, case: p in ("decode", "verify") and not case.reads_only,
    moves=lambda case: 2 * case.sequences * cost.state_bytes(case),
)
COPY_DRAFTS = Impl(
    "copy_drafts",
    _copy_drafts,
    lambda p, case: p == "verify" and not case.reads_only,
    moves=lambda case: (case.sequences + cost.drafts(case)) * cost.state_bytes(case),
)
READ_STATE = Impl(
    "read_state",
    _read_state,
    lambda p, case: p == "verify" and case.reads_only,
    moves=lambda case: case.sequences * cost.state_bytes(case),
)
