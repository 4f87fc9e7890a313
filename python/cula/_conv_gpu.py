# SPDX-License-Identifier: Apache-2.0
"""The short convolution on GPUs, by the libraries that have it: the package causal-conv1d, then FLA; its step
by the former alone.

Each function returns None for a call that no installed library takes. x is `[B, T, D]`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def library_function(module: str, name: str) -> Callable[..., Any] | None:
    """Of a library that may not be there, or may not load on this machine."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # a library that was built for another PyTorch raises what it likes
        return None


def _suits_package(x: Tensor, weight: Tensor) -> bool:
    """causal-conv1d takes widths from 2 to 4, and channels side by side in groups of eight."""
    return 2 <= weight.shape[1] <= 4 and x.shape[2] % 8 == 0 and x.stride(2) == 1 and x.stride(1) % 8 == 0


def _numbered(x: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> tuple[Tensor, Tensor]:
    """A number for each token `[B, T]`, which changes from one sequence to the next, and whether a sequence
    has the token."""
    if seq_idx is None:
        assert cu_seqlens is not None
        token = torch.arange(x.shape[1], device=x.device)
        seq_idx = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)[None]
        return seq_idx.to(torch.int32), seq_idx < len(cu_seqlens) - 1
    changes = torch.zeros_like(seq_idx, dtype=torch.int32)
    changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return changes.cumsum(1, dtype=torch.int32), seq_idx >= 0


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    final_state_len: int,
) -> tuple[Tensor, Tensor | None] | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    width, activation = weight.shape[1], "silu" if silu else None
    states = initial_state is not None or final_state_len > 0
    package = library_function("causal_conv1d", "causal_conv1d_fn")
    suits = _suits_package(x, weight) and final_state_len in (0, width - 1)
    if states:
        suits = suits and cu_seqlens is None and (initial_state is None or initial_state.dtype == x.dtype)
    numbers, real = None, None
    if cu_seqlens is not None or seq_idx is not None:
        numbers, real = _numbered(x, cu_seqlens, seq_idx)
    if package is not None and suits:
        if initial_state is not None:  # its channels side by side, too
            last = initial_state[..., initial_state.shape[2] - (width - 1) :]
            initial_state = last.transpose(1, 2).contiguous().transpose(1, 2)
        made = package(
            x.transpose(1, 2), weight, bias, numbers, initial_states=initial_state,
            return_final_states=final_state_len > 0, activation=activation,
        )  # fmt: skip
        y, final = made if final_state_len > 0 else (made, None)
        return _without_padding(y.transpose(1, 2), real), final
    fla = library_function("fla.modules.convolution", "causal_conv1d")
    if fla is None or seq_idx is not None or final_state_len > width:
        return None
    if initial_state is not None:
        missing = width - initial_state.shape[2]
        initial_state = torch.nn.functional.pad(initial_state, (missing, 0))  # cuts where it is negative
    if x.requires_grad:  # FLA leaves the gradients of tokens behind the last sequence unwritten
        x = _without_padding(x, real)
    y, final = fla(
        x=x, weight=weight, bias=bias, initial_state=initial_state, output_final_state=final_state_len > 0,
        activation=activation, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return _without_padding(y, real), None if final is None else final[..., width - final_state_len :]


def _without_padding(y: Tensor, real: Tensor | None) -> Tensor:
    return y if real is None else torch.where(real[..., None], y, 0)


def convolve_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    conv_state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    cache_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    null_index: int,
) -> Tensor | None:
    package = library_function("causal_conv1d", "causal_conv1d_update")
    if package is None or cu_seqlens is not None or num_accepted_tokens is not None or null_index >= 0:
        return None
    if not 2 <= weight.shape[1] <= 4 or conv_state.dtype != x.dtype:
        return None
    y: Tensor = package(
        x.transpose(1, 2), conv_state, weight, bias, "silu" if silu else None,
        None if cache_seqlens is None else cache_seqlens.to(torch.int32),
        None if conv_state_indices is None else conv_state_indices.to(torch.int32),
    )  # fmt: skip
    return y.transpose(1, 2)
