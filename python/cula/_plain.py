# SPDX-License-Identifier: Apache-2.0
"""The short convolution and the gated RMSNorm in plain PyTorch: any device and dtype, differentiable.

This runs where no kernel takes a call. Sums are taken in float32, or in float64 where the inputs are. x of a
convolution is `[B, T, D]`; a sequence's place in a packed batch is found without a host read.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu as swish


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _places(x: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token `[B, T]`: its sequence, its position there, and whether it is in one at all."""
    batch, tokens = x.shape[:2]
    token = torch.arange(tokens, device=x.device)
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(torch.int64).contiguous()
        sequence = torch.searchsorted(ends, token, right=True)
        real = sequence < len(ends)
        sequence = sequence.clamp(max=max(len(ends) - 1, 0))
        position = token - cu_seqlens.to(torch.int64)[sequence]
        return sequence[None], torch.where(real, position, 0)[None], real[None]
    if seq_idx is not None:
        starts = torch.ones_like(seq_idx, dtype=torch.bool)
        starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        position = token - torch.where(starts, token, 0).cummax(1).values
        return torch.zeros_like(position), position, seq_idx >= 0
    rows = torch.arange(batch, device=x.device)[:, None]
    return rows.expand(batch, tokens), token.expand(batch, tokens), x.new_ones(batch, tokens).bool()


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    silu: bool = False,
    final_state_len: int = 0,
) -> tuple[Tensor, Tensor | None]:
    width = weight.shape[1]
    if initial_state is not None and not len(initial_state):  # no row of it can be looked up
        initial_state = None
    sequence, position, real = _places(x, cu_seqlens, seq_idx)
    rows, taps = wide(x), wide(weight)
    total = torch.zeros_like(rows) if bias is None else wide(bias).expand_as(rows)
    for back in range(width):
        earlier = rows if back == 0 else torch.zeros_like(rows)
        if 0 < back < x.shape[1]:
            earlier = torch.cat([rows[:, :back] * 0, rows[:, :-back]], 1)
        before = (position < back)[..., None]
        if initial_state is None:
            earlier = torch.where(before, 0, earlier)
        elif back:
            state = wide(initial_state)
            column = (state.shape[2] + position - back).clamp(max=state.shape[2] - 1)
            earlier = torch.where(before, state[sequence, :, column], earlier)
        total = total + taps[:, width - 1 - back] * earlier
    y = torch.where(real[..., None], swish(total) if silu else total, 0).to(x.dtype)
    if not final_state_len:
        return y, None
    if cu_seqlens is None:
        begins = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        lengths, row = begins + x.shape[1], torch.arange(x.shape[0], device=x.device)[:, None]
    else:
        begins, lengths = cu_seqlens[:-1].to(torch.int64), cu_seqlens.diff().to(torch.int64)
        row = torch.zeros_like(begins)[:, None]
    place = lengths[:, None] - final_state_len + torch.arange(final_state_len, device=x.device)
    padded = torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], 1)
    at = torch.where(place >= 0, begins[:, None] + place, x.shape[1])
    last = padded[row, at]
    if initial_state is not None:
        column = place + initial_state.shape[2]
        number = torch.arange(len(begins), device=x.device)[:, None]
        found = initial_state[number, :, column.clamp(0, initial_state.shape[2] - 1)].to(x.dtype)
        last = torch.where(((place < 0) & (column >= 0))[..., None], found, last)
    return y, last.transpose(1, 2)


def convolve_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
    conv_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    null_index: int = -1,
) -> Tensor:
    """`conv_state` is updated in place, by writes that all rows of a batch share: null rows write what is
    there."""
    if cu_seqlens is not None:
        y = torch.zeros_like(x)
        ends: list[int] = cu_seqlens.tolist()
        for n, (begin, end) in enumerate(pairwise(ends)):
            part = [
                None if each is None else each[n : n + 1]
                for each in (conv_state_indices, cache_seqlens, num_accepted_tokens)
            ]
            slots = torch.tensor([n], device=x.device) if part[0] is None else part[0]
            y[:, begin:end] = convolve_step(
                x[:, begin:end], conv_state, weight, bias, silu, slots, None, part[1], part[2], null_index
            )
        return y
    if not len(conv_state) or not len(x):  # all rows are null, or there are none
        return torch.zeros_like(x)
    rows, tokens, width, columns = x.shape[0], x.shape[1], weight.shape[1], conv_state.shape[2]
    device, before = x.device, width - 1
    slots = torch.arange(rows, device=device) if conv_state_indices is None else conv_state_indices.long()
    real = (slots >= 0) & (slots != null_index)
    safe = torch.where(real, slots, 0)
    old = conv_state[safe]
    taps_at, fresh = torch.arange(before, device=device), torch.arange(tokens, device=device)
    everything = torch.cat([old, x.transpose(1, 2).to(old.dtype)], 2)
    at = torch.arange(columns, device=device).expand(rows, columns)
    if cache_seqlens is not None:
        past = cache_seqlens.long()[:, None]
        window = (past - before + taps_at) % columns
        token = tokens - 1 - (past + tokens - 1 - at) % columns  # the latest one in each column
        source = torch.where(token >= 0, columns + token, at)
    elif num_accepted_tokens is not None:
        offset = torch.where(real, num_accepted_tokens.long(), 1)[:, None] - 1
        kept = max(width - 2, 0)
        window = offset + taps_at
        source = torch.where(
            at < kept, offset + 1 + at, torch.where(at < kept + tokens, at - kept + columns, at)
        )
    else:
        window = (columns - before + taps_at).expand(rows, before)
        source = at + tokens
    history = old.gather(2, window[:, None].expand(rows, x.shape[2], before)).transpose(1, 2)
    seen = torch.cat([wide(history), wide(x)], 1)
    total = torch.zeros_like(wide(x)) if bias is None else wide(bias).expand(x.shape)
    for j in range(width):
        total = total + wide(weight)[:, j] * seen[:, j + fresh]
    y = torch.where(real[:, None, None], swish(total) if silu else total, 0).to(x.dtype)
    new = everything.gather(2, source[:, None].expand(rows, x.shape[2], columns))
    write_slots(conv_state, slots, real, new)
    return y


def write_slots(pool: Tensor, slots: Tensor, real: Tensor, rows: Tensor) -> None:
    """Row n into slot `slots[n]` where it is real, without a host read: a null row writes what the first real
    one does, and where there is none, what is there."""
    first = real.to(torch.int32).argmax()
    source = torch.where(real, torch.arange(len(real), device=real.device), first)
    slot = torch.where(real, slots, 0)[source]
    pool.index_copy_(0, slot, torch.where(real.any(), rows[source].to(pool.dtype), pool[slot]))


def norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    sigmoid: bool = False,
    norm_before_gate: bool = True,
    group_size: int = 0,
    zero_centered: bool = False,
) -> Tensor:
    y = wide(x)
    act = None if gate is None else torch.sigmoid(wide(gate)) if sigmoid else swish(wide(gate))
    if act is not None and not norm_before_gate:
        y = y * act
    width = group_size or x.shape[-1]
    groups = y.reshape(*y.shape[:-1], x.shape[-1] // width, width)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * (wide(weight) + 1 if zero_centered else wide(weight))
    if bias is not None:
        y = y + wide(bias)
    if act is not None and norm_before_gate:
        y = y * act
    return y.to(x.dtype)
