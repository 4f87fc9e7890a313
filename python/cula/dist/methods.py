# SPDX-License-Identifier: Apache-2.0
"""The two ways of passing states on, from any rank's point of view.

A run of tokens maps the state, S -> M S + B, and maps compose (ALGORITHM.md). `scan`: every rank makes the
map of its tokens, as far as later ranks want it, and sends it to them; each composes those before it into the
state that its tokens start from, and runs from there. `ring`: each rank runs when the state from the rank
before has come, and sends its own on.

Products of maps are the library's own kernel, in float32 on a GPU and float64 on a CPU: no setting of the
process (TF32, bf16) lowers their precision.
"""

from __future__ import annotations

from torch import Tensor

from cula.dist.calls import Call
from cula.dist.lanes import Lanes
from cula.dist.messages import Message
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
        assert final is not None  # it was asked for
        transport.send_next(lanes.leave(final))
    return o, final if keep else None


def scan(
    call: Call, transport: Transport, lanes: Lanes, initial_state: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    rank, last = transport.rank, transport.rank == transport.size - 1
    if transport.size == 1:
        return prefill(call, lanes, initial_state, keep)
    kept = None
    if rank == 0 and not lanes.keeps:
        # It knows where it starts, and its final state is its B. Nobody reads the M of a first rank.
        message = Message.empty(call, lanes.count)
        o, final = prefill(call, lanes, initial_state, True)
        assert final is not None  # it was asked for
        message.b.copy_(lanes.leave(final))
        transport.gather_earlier(message.whole, message.b_count)
        return o, final if keep else None
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
    return prefill(
        call, lanes, initial_state if state is None else lanes.enter(initial_state, state), keep, kept
    )


def prefill(
    call: Call, lanes: Lanes, initial_state: Tensor | None, keep: bool, kept: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    return call.run(
        initial_state=initial_state, output_final_state=keep, cu_seqlens=lanes.cu_seqlens, kept=kept
    )


def exchange(transport: Transport, message: Message, joins: Tensor | None) -> Tensor | None:
    """The states that the lanes bring from the ranks before; None on the first."""
    gathered = transport.gather_earlier(message.whole, message.b_count)
    return message.compose(gathered, joins) if transport.rank else None
