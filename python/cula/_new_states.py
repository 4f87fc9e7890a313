# SPDX-License-Identifier: Apache-2.0
"""States that a call writes and Python makes: the operators make all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._ops import state_dtype

if TYPE_CHECKING:
    from ._passes import States


def of_sequences(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, states: States, null_index: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The memory of a dense final state, the indices of the call's rows in it, and those rows.

    Indices are needed where the initial states are gathered by index, and none of them may be the null slot:
    where that is among them, the rows up to it are left unused. The rows of skipped sequences stay zero.
    """
    batch, _, heads, value_dim = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (heads, *_matrix(value_dim, q.shape[3], states.v_first))
    if states.initial_indices is None:
        final_state = q.new_empty((sequences, *shape), dtype=state_dtype(q))
        return final_state, None, final_state
    first = null_index + 1 if null_index is not None and 0 <= null_index < sequences else 0
    memory = q.new_zeros((first + sequences, *shape), dtype=state_dtype(q))
    return memory, torch.arange(first, first + sequences, dtype=torch.int32, device=q.device), memory[first:]


def of_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_size: int,
    state_v_first: bool,
) -> Tensor:
    """The states at chunk starts in k's dtype: one per chunk where the host can read the lengths without
    waiting, else room for the most chunks that lengths could make, zero beyond those they do make."""
    batch, tokens = q.shape[:2]
    shape = (v.shape[2], *_matrix(v.shape[3], q.shape[3], state_v_first))
    if cu_seqlens is None:
        return k.new_empty((batch, -(-tokens // chunk_size), *shape))
    lengths = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    chunks = tokens // chunk_size + cu_seqlens.shape[0] - 1
    if lengths.is_cpu and not torch.compiler.is_compiling():
        chunks = min(chunks, int((-(-lengths.diff() // chunk_size)).clamp(min=0).sum()))
    return k.new_zeros((batch, chunks, *shape))


def _matrix(value_dim: int, key_dim: int, state_v_first: bool) -> tuple[int, int]:
    return (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
