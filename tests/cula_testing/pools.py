# SPDX-License-Identifier: Apache-2.0
"""The memory under a pool of states: what a call changed of it."""

from __future__ import annotations

import torch

from cula_testing.compare import assert_same_bits


def whole(pool: torch.Tensor) -> torch.Tensor:
    """A copy of all the memory under a pool, gaps between slots too."""
    storage = pool.untyped_storage()
    return (
        torch.empty(0, dtype=pool.dtype).set_(storage, 0, (storage.nbytes() // pool.element_size(),)).clone()
    )


def assert_only_changed(before: torch.Tensor, pool: torch.Tensor, slots: list[int]) -> None:
    """Outside the slots, the memory under `pool` holds the bits of `before`."""
    after = whole(pool)
    mask = torch.zeros(after.shape, dtype=torch.bool)
    inside = mask.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    inside[slots] = True
    assert_same_bits("memory outside the slots", before[~mask], after[~mask])
