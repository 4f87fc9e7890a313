# SPDX-License-Identifier: Apache-2.0
"""What `cula.conv` and `cula.norm` refuse on their own: what the kernels of CPUs refuse, for the calls that
plain PyTorch or another library takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _ops, _passes


def reads_values(x: Tensor) -> bool:
    """As elsewhere, values in a GPU's memory are read, which waits for it, only when that is asked for."""
    if is_compiling():
        return False
    return x.device.type == "cpu" or os.environ.get("CULA_DEBUG_CHECKS") == "1"


def check_tensors(needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    for name, x in needed.items():
        _passes.require_tensor(name, x)
    for name, x in optional.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {_ops.type_name(x)}")


def check_floats(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and not x.dtype.is_floating_point:
            raise ValueError(f"{name} must have a floating dtype, got {x.dtype}")


def check_integers(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must have dtype int32 or int64, got {x.dtype}")


def check_written(name: str, x: Tensor) -> None:
    """What is written has a place for each element; by the same test as the kernels'."""
    if is_compiling() or not x.numel():
        return
    reach = 0
    for stride, size in sorted(pair for pair in zip(x.stride(), x.shape, strict=True) if pair[1] > 1):
        if stride <= reach:
            raise ValueError(f"{name} must not overlap itself in memory, got strides of {list(x.stride())}")
        reach += stride * (size - 1)


def check_lengths(x: Tensor, query_start_loc: Tensor) -> None:
    """Their values. x: `[1, T, D]`."""
    if not reads_values(x):
        return
    ends: list[int] = query_start_loc.tolist()
    if ends[0] != 0:
        raise ValueError(f"query_start_loc must begin with 0, got {ends[0]}")
    for before, end in pairwise(ends):
        if end < before:
            raise ValueError(f"query_start_loc must not fall, got {end} behind {before}")
    if ends[-1] > x.shape[1]:
        raise ValueError(f"query_start_loc must end within x's {x.shape[1]} tokens, got {ends[-1]}")


def check_step_values(
    x: Tensor,
    width: int,
    state: Tensor,
    query_start_loc: Tensor | None,
    slots: Tensor | None,
    cache_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    null_index: int,
) -> None:
    """The values of a step's indices, in the order of its rows. x: `[B, T, D]`; null rows may hold any."""
    if not reads_values(x):
        return
    if query_start_loc is None:
        lengths = [x.shape[1]] * x.shape[0]
    else:
        check_lengths(x, query_start_loc)
        lengths = query_start_loc.diff().tolist()
    named = list(range(len(lengths))) if slots is None else slots.tolist()
    before = None if cache_seqlens is None else cache_seqlens.tolist()
    accepted = None if num_accepted_tokens is None else num_accepted_tokens.tolist()
    columns, used = state.shape[2], set()
    for n, (slot, tokens) in enumerate(zip(named, lengths, strict=True)):
        if slot < 0 or slot == null_index:
            continue
        if slot >= state.shape[0]:
            raise ValueError(
                f"conv_state_indices must name slots below {state.shape[0]}, or null, got {slot}"
            )
        if slot in used:
            raise ValueError(f"conv_state_indices must name each slot once, got slot {slot} twice")
        used.add(slot)
        if before is not None and before[n] < 0:
            raise ValueError(f"cache_seqlens must not be negative, got {before[n]}")
        if accepted is None:
            continue
        if not 1 <= accepted[n] <= columns - width + 2:
            raise ValueError(
                f"num_accepted_tokens must be from 1 to {columns - width + 2}, got {accepted[n]}"
            )
        if (needed := max(width - 2, 0) + tokens) > columns:
            raise ValueError(
                f"conv_state must have W - 2 + T = {needed} columns at least with num_accepted_tokens, "
                f"got {columns}"
            )
