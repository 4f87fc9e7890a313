# SPDX-License-Identifier: Apache-2.0
"""Memory whose every byte is known: for the tensors of a call, far apart or between guards, and for its
workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from cula_testing.kinds import Call

GUARD = 4096  # bytes
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Arena:
    def __init__(self, size: int, fill: int = 0) -> None:
        self.bytes = torch.full((size,), fill, dtype=torch.uint8)
        self.used = GUARD

    def place(self, tensor: torch.Tensor, dim: int = 0, stride: int | None = None) -> torch.Tensor:
        """A copy, dense but for the stride of one dimension, behind a guard."""
        strides, inner = list(tensor.contiguous().stride()), tensor.numel()
        if stride is not None:
            strides[dim], inner = stride, inner // max(tensor.shape[dim], 1)
        offset = self.used // tensor.element_size()
        self.used += -(-(inner * tensor.element_size() + GUARD) // GUARD) * GUARD
        assert self.used <= len(self.bytes)
        return self.bytes.view(tensor.dtype).as_strided(tensor.shape, strides, offset).copy_(tensor)

    def hold(self, call: Call) -> Call:
        """The call on copies that lie here."""
        placed = {name: self.place(tensor) for name, tensor in call.tensors.items()}
        inputs = call.inputs.but(**{name: placed[name] for name in placed if hasattr(call.inputs, name)})
        return Call(
            call.kind, inputs, {**call.named, **{name: placed[name] for name in placed if name in call.named}}
        )

    def changed_outside(self, before: torch.Tensor, views: Iterable[torch.Tensor]) -> int:
        """How many bytes differ from `before` that belong to none of the views."""
        inside = torch.zeros_like(self.bytes)
        for view in views:
            mask = inside.view(INTEGERS[view.element_size()])
            mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(
                -1 if view.element_size() > 1 else 255
            )
        return int(((self.bytes != before) & (inside == 0)).sum())


# Requests below a megabyte share small segments in torch's allocator; larger ones are cut from the block that
# fits.
def _blocks() -> list[torch.Tensor]:
    sizes = [256 << 20, *[512 << 10] * 32]
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


@contextmanager
def known_memory(byte: int) -> Iterator[None]:
    """What torch's allocator hands out inside comes from memory that holds this byte."""
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        for block in _blocks():
            block.fill_(byte)
        del block
        for size in (4 << 10, 4 << 20):
            assert (torch.empty(size, dtype=torch.uint8) == byte).all(), (
                "the allocator does not hand out these blocks"
            )
        yield


def peak_bytes(call: Callable[[], object]) -> int:
    """What the call held at most, beside what was held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before
