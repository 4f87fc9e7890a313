# SPDX-License-Identifier: Apache-2.0
"""The implementations that are measured: ours by way of the public Python functions, and the peers.

A new peer is a function that binds it to inputs, and a row in the list of its device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import cula
from bench import eager
from bench.measure import Call
from cula_testing.cases import Case, Inputs, state_like

# Binds one set of inputs: the call returns o and the states, the pool that it was given or dense ones
# [N, HV, V, K].
Bind = Callable[[str, Inputs], Call]

MODES = {row.name: row.mode for row in cula.algorithms().values()}
PREFILL = {name: getattr(cula, f"cula_{mode}") for name, mode in MODES.items()}


@dataclass(frozen=True)
class Impl:
    name: str
    bind: Bind
    takes: Callable[[str, Case], bool]  # pass and case
    computes: bool = True  # False: only moves the states


def keywords(inputs: Inputs) -> dict:
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


def _cula(backend: str | None) -> Bind:
    def bind(pass_name: str, inputs: Inputs) -> Call:
        q, k, v, op = inputs.q, inputs.k, inputs.v, inputs.case.algorithm
        gates = {name: x for name in ("g", "beta", "decay") if (x := getattr(inputs, name)) is not None}
        more = {**gates, **keywords(inputs), "scale": inputs.case.scale, "backend": backend}
        # A serving engine owns its output. On a CPU a new one above 32 MiB would come as fresh pages in every
        # call; their first touch costs the system more than the kernel takes to fill them.
        more["out"] = torch.empty_like(v)
        if pass_name == "prefill":
            return lambda: PREFILL[op](q, k, v, **more, output_final_state=True, cu_seqlens=inputs.cu_seqlens)
        pool, rows = inputs.initial_state, inputs.initial_state_indices
        if pass_name == "decode":
            return lambda: cula.cula_decode(q, k, v, pool, mode=MODES[op], state_indices=rows, **more)
        slots = verify_slots(inputs)
        return lambda: cula.cula_verify(
            q, k, v, pool, mode=MODES[op], state_indices=slots, initial_state_indices=rows, **more
        )

    return bind


def verify_inputs(inputs: Inputs) -> Inputs:
    """The same rows over a pool in which each row's slot is followed by one for each of its draft tokens."""
    case, device = inputs.case, inputs.q.device
    stride = 1 + case.lengths[0]
    pool = state_like(case, case.sequences * stride, fill=0.0, device=device)
    own = torch.arange(case.sequences, dtype=torch.int32, device=device) * stride
    pool[own.long()] = inputs.initial_state[inputs.initial_state_indices.long()]
    return inputs.but(initial_state=pool, initial_state_indices=own)


def verify_slots(inputs: Inputs) -> torch.Tensor:
    """[N, S]: the slots that take the states after each draft token."""
    drafts = torch.arange(1, 1 + inputs.case.lengths[0], dtype=torch.int32, device=inputs.q.device)
    return inputs.initial_state_indices[:, None] + drafts


def states_of(pass_name: str, inputs: Inputs, states: torch.Tensor) -> torch.Tensor:
    """The final states [N, HV, V, K] from what a bound call returned."""
    if states is not inputs.initial_state:
        return states
    rows = verify_slots(inputs)[:, -1] if pass_name == "verify" else inputs.initial_state_indices
    return states[rows.long()]


def _eager(form: Callable) -> Bind:
    def bind(pass_name: str, inputs: Inputs) -> Call:
        if pass_name == "prefill":
            return lambda: form(inputs)
        pool, rows = inputs.initial_state, inputs.initial_state_indices.long()

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            o, pool[rows] = form(inputs, pool[rows])
            return o, pool

        return step

    return bind


def _copy_state(_pass_name: str, inputs: Inputs) -> Call:
    """One plain copy of the states that the call reads: the floor of a decode."""
    source = inputs.initial_state[inputs.initial_state_indices.long()]
    target = source.clone()
    return lambda: target.copy_(source)


# Peers and forced backends run up to this length; the longer cases show how our own time grows.
COMPARED_TOKENS = 4096


def _comparable(_pass_name: str, case: Case) -> bool:
    return sum(case.lengths) <= COMPARED_TOKENS


OURS = Impl("cula", _cula(None), lambda _pass, _case: True)
# The kernels that every GPU has, where dispatch prefers those of Hopper.
PORTABLE = Impl("cula:sm80", _cula("sm80"), lambda p, _case: p == "prefill")
COPY_STATE = Impl("copy_state", _copy_state, lambda p, _case: p != "prefill", computes=False)


def cpu_impls() -> list[Impl]:
    """What dispatch picks, each CPU target of this machine by name, and what runs on any machine."""
    rows = cula.explain(device="cpu")
    found = [row.target for row in rows if row.verdict != "no" and not row.target.startswith("reference")]
    return [
        OURS,
        *(Impl(f"cula:{name}", _cula(name), _comparable) for name in found),
        Impl(
            "eager_chunk", _eager(eager.chunk_form), lambda p, case: p == "prefill" and _comparable(p, case)
        ),
        Impl(
            "eager_recurrent",
            _eager(eager.recurrence),
            lambda p, case: p != "verify" and _comparable(p, case),
        ),
        COPY_STATE,
    ]
