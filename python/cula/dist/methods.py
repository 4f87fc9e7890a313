# SPDX-License-Identifier: Apache-2.0
"""The two ways of passing states on, from any rank's point of view.

A run of tokens maps the state, S -> M S + B, and maps compose (ALGORITHM.md). `scan`: every rank makes the
map of its tokens, as far as later ranks want it, and sends it to them; each composes those before it into the
state that its tokens start from, and runs from there. `ring`: each rank runs when the state from the rank
before has come, and sends its own on.

Their backward passes go from the last rank to the first: with Z the gradient of a state, Z before the tokens
is M^T Z + E, with Z behind them and E what the tokens themselves give: the gradient of their initial state
where that of the final state is zero. `scan_back`: every rank makes its E and sends it with the M of its
forward pass to the ranks before; each composes those behind it into the gradient of its final state, and runs
the backward pass of its tokens from there. `ring_back`: each rank runs when the gradient from the rank behind
has come.

Products of maps are the library's own kernel, in float32 on a GPU and float64 on a CPU: no setting of the
process (TF32, bf16) lowers their precision.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from torch import Tensor

from .calls import Call
from .lanes import Lanes
from .messages import Message
from .transport import Transport


class Kept(NamedTuple):
    """What a rank's backward pass needs besides its inputs."""

    state: Tensor | None = None  # what the lanes brought
    m: Tensor | None = None  # of the message of a backward pass; where there are ranks on both sides


class Made(NamedTuple):
    o: Tensor
    final_state: Tensor | None
    kept: Kept = Kept()


class Upstream(NamedTuple):
    """What a loss hands back to a rank: the gradients of o and of the final states of its sequences, None
    for zero; and the names of its inputs that want theirs."""

    d_o: Tensor | None
    d_final_state: Tensor | None
    wanted: Set[str]


Gradients = dict[str, Tensor]


def ring(call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, keep: bool) -> Made:
    last = transport.rank == transport.size - 1
    state = None
    if transport.rank > 0:
        state = transport.receive_previous(call.states(lanes.count))
        initial_state = lanes.enter(initial_state, state)
    o, final = prefill(call, lanes, initial_state, keep or not last)
    if not last:
        assert final is not None  # it was asked for
        transport.send_next(lanes.leave(final))
    return Made(o, final if keep else None, Kept(state))


def ring_back(
    call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, kept: Kept, up: Upstream
) -> Gradients:
    if kept.state is not None:
        initial_state = lanes.enter(initial_state, kept.state)
    if transport.rank < transport.size - 1:
        brought = transport.receive_next(call.states(lanes.count))
        up = up._replace(d_final_state=lanes.back.enter(up.d_final_state, brought))
    if transport.rank > 0:
        up = up._replace(wanted=up.wanted | {"initial_state"})
    gradients = backward(call, lanes, initial_state, up)
    if transport.rank > 0:
        transport.send_previous(lanes.back.leave(gradients["initial_state"]))
    return gradients


def scan(call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, keep: bool) -> Made:
    rank, last = transport.rank, transport.rank == transport.size - 1
    if transport.size == 1:
        return Made(*prefill(call, lanes, initial_state, keep))
    kept = None
    if rank == 0 and not lanes.keeps:
        # It knows where it starts, and its final state is its B. Nobody reads the M of a first rank.
        message = Message.empty(call, lanes.count)
        o, final = prefill(call, lanes, initial_state, True)
        assert final is not None  # it was asked for
        message.b.copy_(lanes.leave(final))
        transport.gather_earlier(message.whole, message.b_count)
        return Made(o, final if keep else None)
    if lanes.keeps or not last:
        # What the last rank says nobody reads; of what the first one says, M nobody but its own state, if it
        # has one.
        start = lanes.start(initial_state)
        message, kept = lanes.segment(call, m=not last and (rank > 0 or start is not None), b=not last)
        if start is not None:
            message.start_from(start)
    else:
        message = Message.empty(call, lanes.count)
    state = exchange(transport, message, lanes.joins())
    if state is not None:
        initial_state = lanes.enter(initial_state, state)
    o, final = prefill(call, lanes, initial_state, keep, kept)
    return Made(o, final, Kept(state, message.turned_m if rank > 0 and not last else None))


def scan_back(
    call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, kept: Kept, up: Upstream
) -> Gradients:
    """E is made apart on every rank, the last one too, which could have it from its whole backward pass: the
    others would wait for that instead of a part."""
    if kept.state is not None:
        initial_state = lanes.enter(initial_state, kept.state)
    if transport.size == 1:
        return backward(call, lanes, initial_state, up)
    message = Message.empty(call, lanes.count)
    if kept.m is not None:
        message.m.copy_(kept.m)
    if transport.rank > 0:
        own = backward(call, lanes, initial_state, up._replace(wanted={"initial_state"}))
        message.b.copy_(lanes.back.leave(own["initial_state"]))
    gathered = transport.gather_later(message.whole, message.b_count)
    if transport.rank < transport.size - 1:
        brought = message.compose(gathered, lanes.back.joins())
        up = up._replace(d_final_state=lanes.back.enter(up.d_final_state, brought))
    return backward(call, lanes, initial_state, up)


def prefill(
    call: Call, lanes: Lanes, initial_state: Tensor | None, keep: bool, kept: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    o, final = call.run(
        initial_state=initial_state, output_final_state=keep, cu_seqlens=lanes.cu_seqlens, kept=kept
    )
    return o, final


def backward(call: Call, lanes: Lanes, initial_state: Tensor | None, up: Upstream) -> Gradients:
    return call.gradients(up.wanted, initial_state, lanes.cu_seqlens, up.d_o, up.d_final_state)


def exchange(transport: Transport, message: Message, joins: Tensor | None) -> Tensor | None:
    """The states that the lanes bring from the ranks before; None on the first."""
    gathered = transport.gather_earlier(message.whole, message.b_count)
    return message.compose(gathered, joins) if transport.rank else None
