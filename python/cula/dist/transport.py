# SPDX-License-Identifier: Apache-2.0
"""How ranks exchange tensors: the few verbs that context and tensor parallelism need.

Everything above speaks to `Transport`. `ProcessGroupTransport` is torch.distributed; one over symmetric
memory, where ranks read each other's maps in place, would be another class of the same verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Group

# Up to so many ranks what later ones need is sent to each of them: half of what an all-gather moves, and of
# the first rank's message a part. Beyond, a ring shares its links better.
MOST_DIRECT = 8

# Its name until PyTorch 2.12.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport(Protocol):
    size: int
    rank: int

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x: `[size, *x.shape]`."""

    def gather_earlier(self, x: Tensor, of_first: int) -> Tensor:
        """The x, `[n]`, of every rank before this one: `[rank, n]`. Of the first rank's only the last
        `of_first` numbers count."""

    def gather_later(self, x: Tensor, of_last: int) -> Tensor:
        """The x, `[n]`, of every rank after this one, the last rank's first: `[size - 1 - rank, n]`. Of the
        last rank's only the last `of_last` numbers count."""

    def send_next(self, x: Tensor) -> None:
        """x, to the next rank."""

    def receive_previous(self, x: Tensor) -> Tensor:
        """x, filled by the previous rank."""

    def send_previous(self, x: Tensor) -> None:
        """x, to the previous rank."""

    def receive_next(self, x: Tensor) -> Tensor:
        """x, filled by the next rank."""

    def exchange(self, x: Tensor) -> Tensor:
        """`x[r]` of `[size, ...]` goes to rank r; returns what each rank sent here, in the same shape."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The x of rank `source`, on all ranks."""

    def sum(self, x: Tensor, destination: int | None = None) -> Tensor:
        """The sum of every rank's x, on rank `destination` or on all."""


class ProcessGroupTransport:
    """No verb is asynchronous: nothing is left to do meanwhile. Collectives then need no stream of NCCL's
    own."""

    def __init__(self, group: Group) -> None:
        self._group = group.process_group
        self.size, self.rank = group.size, group.rank

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        # Backends differ in what shapes they take; one dimension is right for all.
        _all_gather_single(gathered.view(-1), x.view(-1), group=self._group)
        return gathered

    def gather_earlier(self, x: Tensor, of_first: int) -> Tensor:
        if self.size > MOST_DIRECT:
            return self.all_gather(x)[: self.rank]
        return self._gather(x, range(self.rank), range(self.rank + 1, self.size), 0, of_first)

    def gather_later(self, x: Tensor, of_last: int) -> Tensor:
        last = self.size - 1
        if self.size > MOST_DIRECT:
            return self.all_gather(x)[self.rank + 1 :].flip(0)
        return self._gather(x, range(last, self.rank, -1), range(self.rank), last, of_last)

    def _gather(
        self, x: Tensor, sources: Sequence[int], destinations: Sequence[int], end: int, of_end: int
    ) -> Tensor:
        """The x of the sources, in their order, while this rank's goes to the destinations. Of rank `end`'s
        only the last `of_end` numbers travel."""
        gathered = x.new_empty((len(sources), *x.shape))

        def part(message: Tensor, rank: int) -> Tensor:
            return message[len(message) - of_end :] if rank == end else message

        def operation(verb: Callable[..., object], message: Tensor, peer: int) -> dist.P2POp:
            return dist.P2POp(verb, message, group=self._group, group_peer=peer)

        receives = [
            operation(dist.irecv, part(to, peer), peer) for peer, to in zip(sources, gathered, strict=True)
        ]
        own = part(x, self.rank)
        sends = [operation(dist.isend, own, peer) for peer in destinations]
        for work in dist.batch_isend_irecv(receives + sends):
            work.wait()
        return gathered

    def send_next(self, x: Tensor) -> None:
        dist.send(x.contiguous(), group=self._group, group_dst=self.rank + 1)

    def receive_previous(self, x: Tensor) -> Tensor:
        dist.recv(x, group=self._group, group_src=self.rank - 1)
        return x

    def send_previous(self, x: Tensor) -> None:
        dist.send(x.contiguous(), group=self._group, group_dst=self.rank - 1)

    def receive_next(self, x: Tensor) -> Tensor:
        dist.recv(x, group=self._group, group_src=self.rank + 1)
        return x

    def exchange(self, x: Tensor) -> Tensor:
        exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(exchanged.view(-1), x.reshape(-1), group=self._group)
        return exchanged

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        dist.broadcast(x, group=self._group, group_src=source)
        return x

    def sum(self, x: Tensor, destination: int | None = None) -> Tensor:
        if destination is None:
            dist.all_reduce(x, group=self._group)
        else:
            dist.reduce(x, group=self._group, group_dst=destination)
        return x
