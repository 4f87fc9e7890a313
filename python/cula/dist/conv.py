# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions, which models run before linear attention, over tokens that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import gradients
from .groups import GroupLike, resolve
from .shards import check_cu_seqlens, check_splits, crossings, device_borders
from .transport import ProcessGroupTransport


def conv_boundary_tokens(
    x: Tensor,
    *,
    sp_group: GroupLike,
    sp_size: int | None = None,
    sp_rank: int | None = None,
    width: int = 4,
    cu_seqlens: Tensor | None = None,
    sp_splits: Sequence[int] | None = None,
) -> Tensor:
    """The tokens that a causal convolution of `width` needs from before the rank's first:
    `[B, width - 1, ...]`.

    x: the rank's tokens `[B, T, ...]`. cu_seqlens, sp_splits: as in `cula.dist.cula_kda_cp`. Before the
    beginning of a sequence there are zeros. Every rank sends its last `width - 1` tokens. Transposed, the
    result is what `cula.conv.causal_conv1d_fn` takes as `initial_states` of the rank's first sequence.
    All ranks go backward through their results, or none does.
    """
    group = resolve("sp", sp_group, sp_size, sp_rank, required=True)
    if width < 2:
        raise ValueError(f"width must be at least 2, got {width}")
    need, held = width - 1, x.shape[1]
    splits = check_splits(sp_splits, group.size, group.rank, held)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, splits[-1])
    tail = x[:, max(0, held - need) :]
    padded = torch.cat([x.new_zeros((x.shape[0], need - tail.shape[1], *x.shape[2:])), tail], dim=1)
    (tails,) = gradients.all_gather(ProcessGroupTransport(group), padded)
    parts = [tails[group.rank][:, :0]]  # nothing, so that the result depends on the exchange on every rank
    for rank in reversed(range(group.rank)):
        take = min(need, splits[rank + 1] - splits[rank])
        parts.insert(0, tails[rank][:, tails.shape[2] - take :])
        need -= take
    parts.insert(0, x.new_zeros((x.shape[0], need, *x.shape[2:])))
    boundary = torch.cat(parts, dim=1)
    if cu_seqlens is None:
        return boundary
    begin = splits[group.rank]
    entering = crossings(cu_seqlens, device_borders(splits, x.device))[group.rank]
    start = cu_seqlens.index_select(0, entering.clamp(min=0)[None])
    positions = torch.arange(begin - width + 1, begin, device=x.device)
    own = (entering >= 0) & (positions >= start)
    return torch.where(own.view(1, -1, *[1] * (x.dim() - 2)), boundary, 0)
