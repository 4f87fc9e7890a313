# SPDX-License-Identifier: Apache-2.0
"""The lanes of a context-parallel call: the sequences whose states go from rank to rank.

A batch has a lane per row, and every row crosses every border. Packed tokens have one lane: at most one
sequence crosses a border. Which one is known to the device alone, so the lane is always there, and what it
carries is masked where no sequence crosses or another one does.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .calls import Call
from .messages import Message
from .shards import TokenShard


class Ends(Protocol):
    """Where the lanes come in and where they go on: states in a forward pass, in which they come from the
    ranks before; their gradients in a backward pass, in which they come from those after."""

    def joins(self) -> Tensor | None:
        """For each of those ranks, the farthest first: whether the lane that leaves it carries what enters
        this one; None: all do."""

    def enter(self, states: Tensor | None, brought: Tensor) -> Tensor:
        """The states of the rank's sequences where tokens begin, those of the lanes being `brought`."""

    def leave(self, states: Tensor) -> Tensor:
        """The lanes' states, from those of the rank's sequences."""


class Lanes(Ends, Protocol):
    count: int

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Of the rank's tokens."""

    @property
    def keeps(self) -> bool:
        """Whether `segment` prepares for the prefill, so that the first and the last rank should call it
        too."""

    @property
    def back(self) -> Ends:
        """In a backward pass."""

    def segment(self, call: Call, m: bool, b: bool) -> tuple[Message, Tensor | None]:
        """The maps of the rank's tokens of each lane, and what a prefill of all the rank's tokens takes as
        `kept`. What is not wanted of `m` and `b` may be anything."""

    def start(self, initial_state: Tensor | None) -> Tensor | None:
        """The states of lanes whose sequence begins on this rank, zero for the others; None for none."""

    def begun(self, states: Tensor) -> Tensor:
        """The states of the rank's sequences, but zero for those that a lane brings."""


class BatchLanes:
    def __init__(self, call: Call, rank: int) -> None:
        self.count, self.cu_seqlens, self._rank = call.q.shape[0], None, rank
        self._may_keep = call.v.shape[3] <= 256
        self._on_gpu = call.q.is_cuda

    @property
    def keeps(self) -> bool:
        return self._on_gpu and self._may_keep

    @property
    def back(self) -> Ends:
        return self  # every row crosses every border

    def segment(self, call: Call, m: bool, b: bool) -> tuple[Message, Tensor | None]:
        message = Message.empty(call, self.count)
        out = message.written_m if m else None, message.b if b else None
        made = call.segment(None, keep=self._may_keep, out=out)
        return message, made[2] if self._may_keep else None

    def start(self, initial_state: Tensor | None) -> Tensor | None:
        return initial_state if self._rank == 0 else None

    def begun(self, states: Tensor) -> Tensor:
        return states if self._rank == 0 else torch.zeros_like(states)

    def joins(self) -> Tensor | None:
        return None

    def enter(self, states: Tensor | None, brought: Tensor) -> Tensor:
        return brought

    def leave(self, states: Tensor) -> Tensor:
        return states


class PackedEnds:
    """behind: the rows that leave the ranks that lanes come from, the farthest first. Rows are numbers of
    sequences, negative for none."""

    def __init__(self, rows: int, entering: Tensor, leaving: Tensor, behind: Tensor) -> None:
        self._rows, self._entering, self._leaving, self._behind = rows, entering, leaving, behind

    def joins(self) -> Tensor | None:
        return self._behind == self._entering

    def enter(self, states: Tensor | None, brought: Tensor) -> Tensor:
        if states is None:
            states = brought.new_zeros((self._rows, *brought.shape[1:]))
        return torch.where(self._brings(), brought, states.to(brought.dtype))

    def leave(self, states: Tensor) -> Tensor:
        return states.index_select(0, self._leaving.clamp(min=0)[None])

    def _brings(self) -> Tensor:
        """`[rows, 1, 1, 1]`: whether a lane brings the row's state."""
        row = torch.arange(self._rows, device=self._entering.device) == self._entering
        return row[:, None, None, None]


class PackedLane(PackedEnds):
    keeps = False
    count = 1

    def __init__(self, shard: TokenShard, rank: int) -> None:
        rows, crossing = shard.cu_seqlens.shape[0] - 1, shard.crossing
        super().__init__(rows, crossing[rank], crossing[rank + 1], crossing[1 : rank + 1])
        self.cu_seqlens, self._leaving_cu_seqlens = shard.cu_seqlens, shard.leaving_cu_seqlens
        later = crossing[rank + 1 : -1].flip(0)
        self.back = PackedEnds(rows, crossing[rank + 1], crossing[rank], later)

    def segment(self, call: Call, m: bool, b: bool) -> tuple[Message, Tensor | None]:
        message = Message.empty(call, 1)
        written_m, written_b = call.segment(self._leaving_cu_seqlens)
        assert written_m is not None  # both were asked for
        assert written_b is not None
        message.written_m.copy_(written_m[1:])
        message.b.copy_(written_b[1:])
        return message, None

    def start(self, initial_state: Tensor | None) -> Tensor | None:
        if initial_state is None:
            return None
        begins = self._leaving != self._entering
        return torch.where(begins, self.leave(initial_state), 0)

    def begun(self, states: Tensor) -> Tensor:
        return torch.where(self._brings(), 0, states)
