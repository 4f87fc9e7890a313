# SPDX-License-Identifier: Apache-2.0
"""How long a head remembers by its gates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import softplus

from . import _ops, _passes

# Decays that are looked at together: 128 MiB in float64, a few times over.
_AT_ONCE = 1 << 24
_STEEPEST = 1e30  # of exp(A_log), as in the kernels


@torch.no_grad()
def tokens_to_forget(
    g: Tensor,
    *,
    bound: float = 2.0**-64,
    use_gate_in_kernel: bool | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """After how many tokens each head has forgotten what was before, by these gates.

    For a head, the smallest n for which the product of the decays of any n tokens in a row of a sequence is
    below `bound`, in every key channel. Whatever a state held is then scaled by less than `bound`, n tokens
    later and from then on; the delta rule, with normalised keys and write strengths from 0 to 2, only shrinks
    it further. With bounds far below 2^-24 nothing of it is left in float32 beside values of like size.
    Kernels may cut a sequence where it has forgotten, so the answer tells which way a model's data go.

    g: `[B, T, HV, K]` or `[B, T, HV]`, any floating dtype: the log decay (at most 0; positive values count as
        0), or the raw gate as the functions for prefill take it.
    bound: between 0 and 1, exclusive.
    use_gate_in_kernel: g is the raw gate; True if None and A_log or lower_bound is given.
    A_log: HV values. dt_bias: HV values, or HV * K, of any shape. lower_bound: negative. As in `cula_kda`.
    decay: HV values, a constant per head on top of g, as in `cula_simple_gla`.
    cu_seqlens: int32 or int64 `[N + 1]` for packed sequences, B is 1. Tokens behind the last do not count.

    Returns int64 `[HV]` on g's device: n in tokens, or -1 where no n up to the length of the longest sequence
    is enough, or a gate of the head is NaN. Logarithms are added in float64. Time is in proportion to g, and
    nothing is read on the host for tensors on a GPU. It has no gradient.

    Raises ValueError for an argument of another shape, dtype, device or size, TypeError for one of another
    type; both name it.
    """
    raw = _is_raw(use_gate_in_kernel, A_log, dt_bias, lower_bound)
    _check(g, bound, A_log, dt_bias, lower_bound, decay, cu_seqlens)
    (batch, tokens, heads), device = g.shape[:3], g.device
    channels = _channels(g, dt_bias)
    bias = None if dt_bias is None else dt_bias.reshape(heads, channels).double()
    gates = (g if g.dim() == 4 else g.unsqueeze(-1)).expand(batch, tokens, heads, channels)
    rates = torch.ones(heads, dtype=torch.float64, device=device)
    if A_log is not None:
        rates = A_log.reshape(heads).double().exp().clamp(max=_STEEPEST)
    slopes = torch.zeros_like(rates) if decay is None else -decay.reshape(heads).double().abs()
    last, longest = _sequences(cu_seqlens, batch, tokens, device)

    needed = torch.ones(heads, dtype=torch.int64, device=device)
    unknown = torch.zeros(heads, dtype=torch.bool, device=device)
    for some, few in _parts(batch * tokens, heads, channels):
        part = gates[:, :, some, few].double()
        if raw:
            shifted = part if bias is None else part + bias[some, few]
            rate = rates[some, None]
            if lower_bound is None:
                part = -rate * softplus(shifted)
            else:
                part = lower_bound * torch.sigmoid(rate * shifted)
        part = part + slopes[some, None]
        part = part.permute(2, 0, 3, 1).masked_fill(last == 0, 0.0)  # [HV, B, K, T]
        unknown[some] |= part.isnan().flatten(1).any(1)
        if tokens and batch:
            wanted = _first_enough(part.nan_to_num(0.0), last, math.log(bound)).flatten(1).amax(1)
            needed[some] = needed[some].maximum(wanted)
    return needed.masked_fill(unknown | (needed > longest), -1)


def _channels(g: Tensor, dt_bias: Tensor | None) -> int:
    """K, or 1 where all channels of a head decay alike; a bias may tell apart what one gate is of."""
    if g.dim() == 4:
        return g.shape[3]
    return 1 if dt_bias is None else dt_bias.numel() // max(1, g.shape[2])


def _first_enough(log_decays: Tensor, last: Tensor, bound: float) -> Tensor:
    """Of every token of [.., T] the number of tokens from it on whose logarithms add up to less than `bound`;
    one more than are left of the sequence where all of them do not."""
    # Below the bound on its own, a token's decay may be anything; so sums stay small, and exact enough.
    behind = -log_decays.clamp(min=2 * bound, max=0.0).cumsum(-1)
    before = torch.nn.functional.pad(behind[..., :-1], (1, 0))
    found = torch.searchsorted(behind, before - bound, right=True)
    place = torch.arange(log_decays.shape[-1], device=log_decays.device)
    return (found.minimum(last) - place + 1).masked_fill(last == 0, 1)


def _sequences(
    cu_seqlens: Tensor | None, batch: int, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of every token the end of its sequence, 0 where it is in none; and the longest length."""
    if cu_seqlens is None:
        length = torch.full((), tokens if batch else 0, device=device)
        return length.expand(tokens), length
    ends = cu_seqlens[1:].long()
    if ends.numel() == 0:
        return torch.zeros(tokens, dtype=torch.int64, device=device), torch.zeros((), device=device)
    owner = torch.searchsorted(ends, torch.arange(tokens, device=device), right=True)
    last = ends[owner.clamp(max=ends.numel() - 1)].clamp(max=tokens)
    return last.masked_fill(owner == ends.numel(), 0), cu_seqlens.long().diff().amax()


def _parts(rows: int, heads: int, channels: int) -> Iterator[tuple[slice, slice]]:
    """Heads and channels in turns, some at once where `rows` tokens leave room."""
    together = max(1, _AT_ONCE // max(1, rows))
    few = min(channels, together)
    some = max(1, together // max(1, channels))
    for head in range(0, heads, some):
        for channel in range(0, channels, few or 1):
            yield slice(head, head + some), slice(channel, channel + few)


def _is_raw(
    use_gate_in_kernel: bool | None, A_log: object, dt_bias: object, lower_bound: float | None
) -> bool:
    if use_gate_in_kernel is None:
        use_gate_in_kernel = A_log is not None or lower_bound is not None
    _passes.check_flags(use_gate_in_kernel=use_gate_in_kernel)
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError(
            "tokens_to_forget: A_log must be given when use_gate_in_kernel is True and lower_bound is not "
            "set, got None"
        )
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
        if not use_gate_in_kernel and value is not None:
            words = _ops.described(value) if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"tokens_to_forget: {name} must be left out when g is the log decay, got {words}"
            )
    return use_gate_in_kernel


def _check(
    g: Tensor,
    bound: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    decay: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    tensors = {"g": g, "A_log": A_log, "dt_bias": dt_bias, "decay": decay, "cu_seqlens": cu_seqlens}
    for name, value in tensors.items():
        if value is None and name != "g":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"tokens_to_forget: {name} must be a tensor, got {_ops.type_name(value)}")
        if not _ops.is_dense(value):
            raise ValueError(f"tokens_to_forget: {name} must be a dense tensor, got {_ops.described(value)}")
        if name != "cu_seqlens" and not value.is_floating_point():
            raise ValueError(f"tokens_to_forget: {name} must have a floating dtype, got {value.dtype}")
        if value.device != g.device:
            raise ValueError(
                f"tokens_to_forget: {name} must be on g's device, {g.device}, got {value.device}"
            )
    if g.dim() not in (3, 4):
        raise ValueError(
            f"tokens_to_forget: g must have shape [B, T, HV, K] or [B, T, HV], got {list(g.shape)}"
        )
    heads = g.shape[2]
    for name, value in (("A_log", A_log), ("decay", decay)):
        if value is not None and value.numel() != heads:
            raise ValueError(
                f"tokens_to_forget: {name} must have {heads} values, one for each head, "
                f"got {list(value.shape)}"
            )
    if dt_bias is not None and dt_bias.numel() != heads * _channels(g, dt_bias):
        wanted = heads * g.shape[3] if g.dim() == 4 else f"a multiple of {heads}"
        raise ValueError(f"tokens_to_forget: dt_bias must have {wanted} values, got {list(dt_bias.shape)}")
    for name, number in (("bound", bound), ("lower_bound", lower_bound)):
        if number is None and name == "lower_bound":
            continue
        if isinstance(number, bool) or not isinstance(number, float | int):
            raise TypeError(f"tokens_to_forget: {name} must be of type float, got {_ops.type_name(number)}")
    if not 0 < bound < 1:
        raise ValueError(f"tokens_to_forget: bound must lie between 0 and 1, got {bound}")
    if lower_bound is not None and not -_STEEPEST <= lower_bound < 0:
        raise ValueError(
            f"tokens_to_forget: lower_bound must be negative and at least -1e30, got {lower_bound}"
        )
    if cu_seqlens is not None:
        _check_lengths(g, cu_seqlens)


def _check_lengths(g: Tensor, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tokens_to_forget: cu_seqlens must have dtype int32 or int64, got {cu_seqlens.dtype}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"tokens_to_forget: cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}"
        )
    if g.shape[0] != 1:
        raise ValueError(f"tokens_to_forget: g must have B = 1 with cu_seqlens, got {list(g.shape)}")
    if cu_seqlens.device.type != "cpu":
        return  # whose values are not read there
    if cu_seqlens[0] != 0 or bool((cu_seqlens.diff() < 0).any()) or cu_seqlens[-1] > g.shape[1]:
        raise ValueError(
            f"tokens_to_forget: cu_seqlens must rise from 0 to at most T = {g.shape[1]}, "
            f"got {cu_seqlens.tolist()}"
        )
