# SPDX-License-Identifier: Apache-2.0
"""The two ways of passing states on, from any rank's point of view.

A run of tokens maps the state, S -> M S + B, and maps compose (ALGORITHM.md). `scan`: every rank makes the map of its
tokens, one all-gather brings all maps to all ranks, each composes those before it into the state that its tokens start
from, and runs from there. `ring`: each rank runs when the state from the rank before has come, and sends its own on.

Products of maps are in float64: no setting of the process (TF32, bf16) lowers their precision, and GPUs of data centres
do them as fast as float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cula.dist.calls import Call
from cula.dist.lanes import Lanes
from cula.dist.transport import Transport


def ring(
    call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    last = transport.rank == transport.size - 1
    if transport.rank > 0:
        state = transport.receive_previous(call.states(lanes.count))
        initial_state = lanes.enter(initial_state, state)
    o, final = prefill(call, lanes, initial_state, keep or not last)
    if not last:
        transport.send_next(lanes.leave(final))
    return o, final if keep else None


def scan(
    call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    rank, last = transport.rank, transport.rank == transport.size - 1
    if transport.size == 1:
        return prefill(call, lanes, initial_state, keep)
    message, rows, kept = new_message(call, lanes.count), rows_of_m(call), None
    m, b = message[:, :, :rows], message[:, :, rows:]
    if rank == 0 and not lanes.keeps:
        # It knows where it starts, and its final state is its B. Nobody reads the M of a first rank.
        o, final = prefill(call, lanes, initial_state, True)
        b.copy_(lanes.leave(final))
        transport.all_gather(message)
        return o, final if keep else None
    if lanes.keeps or not last:  # what the last rank says nobody reads
        own_m, own_b, kept = lanes.segment(call)
        torch.cat((own_m.view_as(m), own_b), dim=2, out=message)
        if (start := lanes.start(initial_state)) is not None:
            b.copy_(apply_(m.double(), b.double(), start.double()))
    joins = [lanes.joins(before) for before in range(rank)]
    state = exchange(transport, message, rows, joins)
    return prefill(call, lanes, initial_state if state is None else lanes.enter(initial_state, state), keep, kept)


def prefill(
    call: Call, lanes: Lanes, initial_state: Tensor | None, keep: bool, kept: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    return call.run(initial_state=initial_state, output_final_state=keep, cu_seqlens=lanes.cu_seqlens, kept=kept)


def rows_of_m(call: Call) -> int:
    """M is a matrix for the delta rules and a diagonal, one row, for the additive ones."""
    return call.q.shape[3] if call.delta else 1


def new_message(call: Call, lanes: int) -> Tensor:
    """Room for a rank's maps: `[lanes, HV, rows of M and then V, K]`."""
    rows = rows_of_m(call) + call.v.shape[3]
    return call.q.new_empty((lanes, call.v.shape[2], rows, call.q.shape[3]), dtype=call.state_dtype)


def exchange(transport: Transport, message: Tensor, rows: int, joins: Sequence[Tensor | None]) -> Tensor | None:
    """The states that the lanes bring from the ranks before; None on the first."""
    maps = transport.all_gather(message)
    return compose(maps[: transport.rank], rows, joins) if transport.rank else None


def compose(maps: Tensor, rows: int, joins: Sequence[Tensor | None]) -> Tensor:
    """What the first map's B becomes under the others, in order: `maps` is `[P, .., rows of M and then V, K]`.

    A rank where a sequence begins has put the state that it starts from into its B, so all start from zero. Where
    `joins` has a False, the map belongs to another sequence, as those before it do.
    """
    state, dtype = None, maps.dtype
    if len(maps) > 1:
        maps = maps.double()
    for one, joined in zip(maps, joins, strict=True):
        m, b = one[..., :rows, :], one[..., rows:, :]
        state = b if state is None else apply_(m, b, state)
        if joined is not None:
            state = torch.where(joined, state, 0)
    return state.to(dtype)


def apply_(m: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """M S + B, in b. States and b are V-first `[.., V, K]`, m is `[.., K, K]` or the diagonal `[.., 1, K]`."""
    if m.shape[-2] == 1:
        return b.addcmul_(m, state)
    flat = (x.flatten(0, -3) for x in (b, state, m.transpose(-1, -2)))
    return next(flat).baddbmm_(*flat).view(b.shape)
