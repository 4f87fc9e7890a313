# SPDX-License-Identifier: Apache-2.0
"""States as a rank keeps them: `[slots, HV / tp_size, V, K]`, zero."""

from __future__ import annotations

import torch
from torch import Tensor


def alloc_state_buffer(
    batch_size: int,
    num_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    *,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> Tensor:
    """Zero states of a batch, an `initial_state`:
    `[batch_size, num_heads / tp_size, head_dim_v, head_dim_k]`.

    num_heads: the value heads of all ranks.
    """
    return _zeros("batch_size", batch_size, num_heads, head_dim_k, head_dim_v, tp_size, dtype, device)


def alloc_decode_state_pool(
    pool_size: int,
    num_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    *,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> Tensor:
    """Zero slots for `cula_decode` and `state_pool`:
    `[pool_size, num_heads / tp_size, head_dim_v, head_dim_k]`.

    num_heads: the value heads of all ranks.
    """
    return _zeros("pool_size", pool_size, num_heads, head_dim_k, head_dim_v, tp_size, dtype, device)


def _zeros(
    count_name: str,
    count: int,
    num_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    given = {"num_heads": num_heads, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v, "tp_size": tp_size}
    for argument, value in given.items():
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if count < 0:
        raise ValueError(f"{count_name} must not be negative, got {count}")
    if num_heads % tp_size:
        raise ValueError(f"num_heads must be a multiple of tp_size, {tp_size}, got {num_heads}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    return torch.zeros((count, num_heads // tp_size, head_dim_v, head_dim_k), dtype=dtype, device=device)
