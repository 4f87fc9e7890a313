# SPDX-License-Identifier: Apache-2.0
"""Which heads and which tokens a rank holds, without waiting for the device.

Heads are cut evenly: rank r of P holds value heads r HV / P to (r + 1) HV / P. Tokens are cut at borders that
the host knows; where the packed sequences begin and end is known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .. import _passes
from .groups import Group, resolve


def take_heads(argument: str, x: Tensor, dim: int, heads: int, group: Group) -> Tensor:
    """The rank's `heads` of x, which has those or all ranks'."""
    _passes.require_tensor(argument, x)
    if x.dim() <= dim:
        raise ValueError(f"{argument} must have more than {dim} dimensions, got {list(x.shape)}")
    if x.shape[dim] == heads:
        return x
    if x.shape[dim] != heads * group.size:
        raise ValueError(
            f"{argument} must have {heads} heads, this rank's, or {heads * group.size}, all, "
            f"got {list(x.shape)}"
        )
    return x.narrow(dim, group.rank * heads, heads)


def take_query_heads(argument: str, x: Tensor, value_heads: int, group: Group) -> Tensor:
    """The query or key heads that the rank's share of all `value_heads` reads; several ranks may share
    one."""
    _passes.require_tensor(argument, x)
    if x.dim() != 4:
        raise ValueError(f"{argument} must have shape [B, T, H, K], got {list(x.shape)}")
    heads, size = x.shape[2], group.size
    if not heads or value_heads % heads or (heads % size and size % heads):
        raise ValueError(
            f"{argument} must have a number of heads that divides v's, {value_heads}, and divides or is a "
            f"multiple of tp_size, {size}, got {heads}"
        )
    return x.narrow(2, group.rank * heads // size, max(1, heads // size))


def take_parameter(argument: str, x: Tensor, heads: int, widths: Sequence[int], group: Group) -> Tensor:
    """The rank's part of a parameter of any shape with so many values (one of `widths`) per head."""
    _passes.require_tensor(argument, x)
    values = x.numel()
    if values in [heads * width for width in widths]:
        return x
    if values not in [heads * width * group.size for width in widths]:
        raise ValueError(
            f"{argument} must have values for {heads} heads, this rank's, or {heads * group.size}, all, "
            f"got {list(x.shape)}"
        )
    share = values // group.size
    return x.reshape(-1).narrow(0, group.rank * share, share)


def even_splits(tokens: int, size: int) -> list[int]:
    """The borders of shards of `ceil(tokens / size)` tokens; what is left of them for the last ranks may be
    nothing."""
    for argument, value, least in (("tokens", tokens, 0), ("size", size, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{argument} must be of type int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")
    share = -(-tokens // size)
    return [min(rank * share, tokens) for rank in range(size + 1)]


def check_splits(
    splits: Sequence[int] | None, size: int, rank: int, held: int | None = None
) -> tuple[int, ...]:
    """`sp_splits` as a tuple: size + 1 ascending borders from 0, between which this rank holds `held`; all
    ranks hold as many where it is None."""
    if splits is None:
        assert held is not None  # one of the two is given
        splits = [held * r for r in range(size + 1)]
    borders = tuple(splits)
    if len(borders) != size + 1 or borders[0] != 0 or any(a > b for a, b in pairwise(borders)):
        raise ValueError(f"sp_splits must be {size + 1} ascending borders from 0, got {list(borders)}")
    if held is not None and borders[rank + 1] - borders[rank] != held:
        raise ValueError(f"sp_splits must give rank {rank} the {held} tokens of its q, got {list(borders)}")
    return borders


def device_borders(splits: Sequence[int], device: torch.device) -> Tensor:
    """int64 `[size + 1]` on the device, made by kernels alone: a copy from the host would wait for it."""
    share = splits[1]
    if all(border == min(rank * share, splits[-1]) for rank, border in enumerate(splits)):
        return (torch.arange(len(splits), device=device) * share).clamp(max=splits[-1])
    return torch.stack([torch.full((), border, dtype=torch.int64, device=device) for border in splits])


def crossings(cu_seqlens: Tensor, borders: Tensor) -> Tensor:
    """int64 `[size + 1]`: the sequence with tokens on both sides of each border, -1 where there is none."""
    begin, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    numbers = torch.arange(1, cu_seqlens.shape[0], device=cu_seqlens.device)
    return (((begin < borders) & (borders < end)) * numbers[:, None]).sum(0) - 1


def final_ranks(cu_seqlens: Tensor, borders: Tensor) -> Tensor:
    """int64 `[N]`: the rank that holds each sequence's last token; an empty one belongs to the token before
    it."""
    return (borders[1:] < cu_seqlens[1:, None]).sum(1)


def local_cu_seqlens(cu_seqlens: Tensor, begin: int, end: int) -> Tensor:
    """All N sequences as the tokens from `begin` to `end` see them: those that lie elsewhere are empty."""
    return (cu_seqlens - begin).clamp(min=0, max=end - begin)


def split_cu_seqlens_for_sp(
    cu_seqlens: Tensor, sp_rank: int, sp_size: int, max_seqlen: int
) -> tuple[Tensor, Tensor]:
    """What a rank sees of packed sequences whose tokens are cut evenly. No host sync.

    cu_seqlens: int32 or int64 `[N + 1]`, of all tokens.
    max_seqlen: the tokens of all ranks together, T of the uncut tensors; rank r holds the tokens from
        `r * ceil(max_seqlen / sp_size)` on (`even_splits`).

    Returns (the rank's `cu_seqlens` `[N + 1]`, in which sequences that lie elsewhere are empty; how many
    tokens of each sequence lie on the ranks before `[N]`). A sequence with tokens before and tokens here goes
    on from its state there.
    """
    check_cu_seqlens(cu_seqlens, max_seqlen)
    group = resolve("sp", None, sp_size, sp_rank, required=False)
    splits = even_splits(max_seqlen, group.size)
    begin, end = splits[group.rank], splits[group.rank + 1]
    before = cu_seqlens.clamp(max=begin)
    return local_cu_seqlens(cu_seqlens, begin, end), before.diff()


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int | None) -> None:
    """What can be checked of global `cu_seqlens` without waiting for the device."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must have dtype int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.is_cpu:
        values = cu_seqlens.tolist()
        if values[0] != 0 or any(a > b for a, b in pairwise(values)):
            raise ValueError(f"cu_seqlens must ascend from 0, got {values}")
        if tokens is not None and values[-1] > tokens:
            raise ValueError(
                f"cu_seqlens must end at or before the {tokens} tokens of all ranks, got {values}"
            )


@dataclass(frozen=True)
class TokenShard:
    """The packed tokens that a rank holds, and the sequences that cross its borders and others'."""

    cu_seqlens: Tensor  # local
    crossing: Tensor  # [size + 1]: the row of the sequence that crosses each border, negative where none does
    final_ranks: Tensor | None  # [N]; None: final states are not asked for
    leaving_cu_seqlens: Tensor  # two sequences: what comes before the leaving one's tokens, and those

    @staticmethod
    def of(cu_seqlens: Tensor, splits: Sequence[int], rank: int) -> TokenShard:
        """Of packed tokens of all ranks. All N sequences are rows, those that lie elsewhere empty."""
        borders = device_borders(splits, cu_seqlens.device)
        crossing = crossings(cu_seqlens, borders)
        local = local_cu_seqlens(cu_seqlens, splits[rank], splits[rank + 1])
        two = _leaving_cu_seqlens(local, crossing[rank + 1], splits[rank + 1] - splits[rank])
        return TokenShard(local, crossing, final_ranks(cu_seqlens, borders), two)

    @staticmethod
    def beside(cu_seqlens: Tensor, rank: int, size: int, before: int, after: int, held: int) -> TokenShard:
        """Of the rank's own sequences alone, none empty: the first has tokens on `before` ranks before this
        one, the last on `after` ranks after."""
        borders = torch.arange(size + 1, device=cu_seqlens.device)
        first = (borders > rank - before) & (borders <= rank)
        last = (borders > rank) & (borders <= rank + after)
        crossing = torch.where(first, 0, torch.where(last, cu_seqlens.shape[0] - 2, -1))
        two = _leaving_cu_seqlens(cu_seqlens, crossing[rank + 1], held)
        return TokenShard(cu_seqlens, crossing, None, two)


def _leaving_cu_seqlens(local: Tensor, leaves: Tensor, held: int) -> Tensor:
    first = local.index_select(0, leaves.clamp(min=0)[None])[0]
    end = torch.where(leaves < 0, 0, held)
    return torch.stack([torch.zeros_like(first), first.minimum(end), end]).to(local.dtype)
