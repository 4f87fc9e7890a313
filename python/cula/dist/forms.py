# SPDX-License-Identifier: Apache-2.0
"""How a call lies over the ranks of context parallelism, and what that makes of its two passes.

A form holds none of the call's tensors: those that a backward pass needs, autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import methods
from .calls import Call
from .lanes import Lanes
from .methods import Gradients, Kept, Made, Upstream
from .transport import Transport


class Form(Protocol):
    """States are V-first."""

    @property
    def transport(self) -> Transport: ...

    @property
    def exchanges(self) -> bool:
        """Whether ranks wait for each other."""

    def forward(self, call: Call, initial_state: Tensor | None) -> Made: ...

    def backward(self, call: Call, initial_state: Tensor | None, kept: Kept, upstream: Upstream) -> Gradients:
        """The gradients that are wanted, and maybe others."""


@dataclass(frozen=True)
class Split:
    """Tokens in rank order, wherever that cuts the sequences."""

    transport: Transport
    lanes: Lanes
    method: str
    where: str | None  # final states go: last, all, end, or None
    here: Tensor | None  # [N]: which packed sequences end on this rank; None for a batch, and without `where`
    exchanges = True

    def forward(self, call: Call, initial_state: Tensor | None) -> Made:
        transport, where = self.transport, self.where
        last = transport.rank == transport.size - 1
        # In a batch only the last rank's final states are those of whole sequences.
        keep = where is not None and (self.here is not None or last)
        run = methods.ring if self.method == "ring" else methods.scan
        made = run(call, transport, self.lanes, initial_state, keep)
        final = made.final_state
        if self.here is not None and where is not None:
            assert final is not None  # it was asked for
            final = _where(self.here, final)
            final = final if where == "end" else deliver(transport, final, where)
        elif where == "all" and transport.size > 1:
            final = transport.broadcast(
                call.states(self.lanes.count) if final is None else final, transport.size - 1
            )
        return made._replace(final_state=final)

    def backward(self, call: Call, initial_state: Tensor | None, kept: Kept, upstream: Upstream) -> Gradients:
        back = methods.ring_back if self.method == "ring" else methods.scan_back
        upstream = upstream._replace(d_final_state=self._d_final_state(call, upstream.d_final_state))
        gradients = back(call, self.transport, self.lanes, initial_state, kept, upstream)
        if "initial_state" in gradients:
            gradients["initial_state"] = self.lanes.begun(gradients["initial_state"])
        return gradients

    def _d_final_state(self, call: Call, d_final_state: Tensor | None) -> Tensor | None:
        """Of the sequences that end on this rank, from what the ranks got that have final states."""
        transport, last = self.transport, self.transport.size - 1
        if self.here is not None and self.where is not None:
            if self.where != "end":
                rows = self.here.shape[0]
                d_final_state = collect(transport, call.states(rows), d_final_state, self.where)
            return None if d_final_state is None else _where(self.here, d_final_state)
        if self.where == "all" and transport.size > 1:
            states = call.states(self.lanes.count)
            if d_final_state is not None:
                states += d_final_state
            d_final_state = transport.sum(states, last)
        return d_final_state if transport.rank == last else None


@dataclass(frozen=True)
class Complete:
    """Whole sequences: nothing is exchanged but final states, on request."""

    transport: Transport
    cu_seqlens: Tensor  # of the rank's own sequences
    begin: int  # their first
    sequences: int  # of all ranks
    where: str | None  # final states go: last, all, end, or None

    @property
    def exchanges(self) -> bool:
        return self.where not in (None, "end")

    def forward(self, call: Call, initial_state: Tensor | None) -> Made:
        count = self.cu_seqlens.shape[0] - 1
        if count:
            o, final = call.run(
                initial_state=initial_state, output_final_state=self.where is not None,
                cu_seqlens=self.cu_seqlens,
            )  # fmt: skip
        else:
            o, final = _nothing(call)
        if not self.exchanges:
            return Made(o, final if self.where else None)
        everyone = call.states(self.sequences)
        everyone[self.begin : self.begin + count] = final
        return Made(o, deliver(self.transport, everyone, self.where))

    def backward(self, call: Call, initial_state: Tensor | None, kept: Kept, upstream: Upstream) -> Gradients:
        count, d_final_state = self.cu_seqlens.shape[0] - 1, upstream.d_final_state
        if self.exchanges:
            d_final_state = collect(self.transport, call.states(self.sequences), d_final_state, self.where)
            d_final_state = d_final_state[self.begin : self.begin + count]
        if not count:
            given = {**call.read(), "initial_state": initial_state}
            return {name: torch.zeros_like(x) for name in upstream.wanted if (x := given[name]) is not None}
        return call.gradients(upstream.wanted, initial_state, self.cu_seqlens, upstream.d_o, d_final_state)


def _where(rows: Tensor, states: Tensor) -> Tensor:
    return torch.where(rows[:, None, None, None], states, 0)


def _nothing(call: Call) -> tuple[Tensor, Tensor]:
    """The results of a rank without a sequence: its tokens, if it has any, belong to none."""
    o = call.options.get("out")
    o = call.v.new_zeros((*call.q.shape[:2], *call.v.shape[2:])) if o is None else o.zero_()
    return o, call.states(0)


def deliver(transport: Transport, final_state: Tensor, where: str | None) -> Tensor | None:
    """Final states of all sequences, each of them zero on all ranks but one, to those that ask: sums are
    exact."""
    last = transport.size - 1
    if transport.size > 1:
        final_state = transport.sum(final_state, last if where == "last" else None)
    return final_state if where == "all" or transport.rank == last else None


def collect(transport: Transport, states: Tensor, d_final_state: Tensor | None, where: str | None) -> Tensor:
    """The gradients of final states that `deliver` delivered, on all ranks: the sum of what the ranks got
    that have them. `states`: as many zero states."""
    if d_final_state is not None:
        states += d_final_state
    if transport.size == 1:
        return states
    return transport.sum(states) if where == "all" else transport.broadcast(states, transport.size - 1)
