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

from cula.dist.calls import Call
from cula.dist.messages import Message
from cula.dist.shards import TokenShard


class Lanes(Protocol):
    count: int

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Of the rank's tokens."""

    @property
    def keeps(self) -> bool:
        """Whether `segment` prepares for the prefill, so that the first and the last rank should call it
        too."""

    def segment(self, call: Call, m: bool, b: bool) -> tuple[Message, Tensor | None]:
        """The maps of the rank's tokens of each lane, and what a prefill of all the rank's tokens takes as
        `kept`. What is not wanted of `m` and `b` may be anything."""

    def start(self, initial_state: Tensor | None) -> Tensor | None:
        """The states of lanes whose sequence begins on this rank, zero for the others; None for none."""

    def joins(self) -> Tensor | None:
        """`[rank]`: whether the lane that leaves each rank before carries what enters this one; None: all
        do."""

    def enter(self, initial_state: Tensor | None, state: Tensor) -> Tensor:
        """The initial states of the rank's sequences, where a lane brings `state`."""

    def leave(self, final_state: Tensor) -> Tensor:
        """The lanes' states from the final states of the rank's sequences."""


class BatchLanes:
    def __init__(self, call: Call, rank: int) -> None:
        self.count, self.cu_seqlens, self._rank = call.q.shape[0], None, rank
        self._may_keep = call.v.shape[3] <= 256
        self._on_gpu = call.q.is_cuda

    @property
    def keeps(self) -> bool:
        return self._on_gpu and self._may_keep

    def segment(self, call: Call, m: bool, b: bool) -> tuple[Message, Tensor | None]:
        message = Message.empty(call, self.count)
        out = message.written_m if m else None, message.b if b else None
        made = call.segment(None, keep=self._may_keep, out=out)
        return message, made[2] if self._may_keep else None

    def start(self, initial_state: Tensor | None) -> Tensor | None:
        return initial_state if self._rank == 0 else None

    def joins(self) -> Tensor | None:
        return None

    def enter(self, initial_state: Tensor | None, state: Tensor) -> Tensor:
        return state

    def leave(self, final_state: Tensor) -> Tensor:
        return final_state


class PackedLane:
    keeps = False

    def __init__(self, shard: TokenShard, rank: int) -> None:
        self.count, self.cu_seqlens = 1, shard.cu_seqlens
        self._shard, self._rank, self._leaving = shard, rank, shard.leaving[rank]

    def segment(self, call: Call, m: bool, b: bool) -> tuple[Message, Tensor | None]:
        message = Message.empty(call, 1)
        written_m, written_b = call.segment(self._shard.leaving_cu_seqlens)
        assert written_m is not None  # both were asked for
        assert written_b is not None
        message.written_m.copy_(written_m[1:])
        message.b.copy_(written_b[1:])
        return message, None

    def start(self, initial_state: Tensor | None) -> Tensor | None:
        if initial_state is None:
            return None
        begins = self._leaving != self._shard.entering
        return torch.where(begins, self.leave(initial_state), 0)

    def joins(self) -> Tensor | None:
        return self._shard.leaving[: self._rank] == self._shard.entering

    def enter(self, initial_state: Tensor | None, state: Tensor) -> Tensor:
        entering, sequences = self._shard.entering, self.cu_seqlens.shape[0] - 1
        if initial_state is None:
            initial_state = state.new_zeros((sequences, *state.shape[1:]))
        row = torch.arange(sequences, device=state.device) == entering
        return torch.where(row[:, None, None, None], state, initial_state.to(state.dtype))

    def leave(self, final_state: Tensor) -> Tensor:
        return final_state.index_select(0, self._leaving.clamp(min=0)[None])
