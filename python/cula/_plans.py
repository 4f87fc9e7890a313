# SPDX-License-Identifier: Apache-2.0
"""Plans of checkpoints, made where the lengths of the sequences are."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _ops

# Checkpoints lie on the boundaries of the kernels' chunks.
_CHUNK = 64
_INDICES = (torch.int32, torch.int64)


def checkpoint_plan(
    cu_seqlens: Tensor,
    interval: int,
    slots: Tensor | None = None,
    *,
    tokens: int,
    seen: Tensor | None = None,
    null_index: int = -1,
) -> Tensor:
    """The plan of `Checkpoints` that keeps the state of every sequence after every `interval` tokens.

    It is made on the device of `cu_seqlens`, in a few operators of PyTorch: the host reads nothing and waits
    for nothing, and the number of rows follows from sizes alone. So it can be made in a CUDA graph and under
    `torch.compile(fullgraph=True)`, and the plan of a replayed graph follows the lengths of that replay.

    cu_seqlens: int32 or int64 `[N + 1]`, as in the call that the plan is for.
    interval: a multiple of 64 tokens.
    slots: int32 or int64 `[N, S]`, of any strides: the state after a sequence's first `interval` tokens goes
        to `slots[n, 0]`, that after the next to `slots[n, 1]`, and so on, as in the block table of an engine.
        States beyond S, and those whose slot is negative or `null_index`, are not kept. None: row m goes to
        slot m, in the order of the sequences, so that `Checkpoints.states` has as many slots as the plan has
        rows.
    tokens: the most tokens that all sequences can have together, that is T of q `[1, T, H, K]`. There are
        `tokens // interval` rows, with `seen` N more.
    seen: int32 or int64 `[N]`, how many tokens of each sequence came before this call (a prompt in pieces).
        Intervals and slots count from the sequence's first token then. A boundary that is neither a multiple
        of 64 tokens into the call nor its end is no checkpoint that a kernel can keep, and its row is unused.
    null_index: a slot that means none, beside negative ones.

    Returns `[M, 3]` rows (sequence, tokens, slot), int64 where `slots` is, else int32. Unused rows are
    (0, 0, -1).

    Raises ValueError for an argument of another shape, dtype or device, or an interval that is no positive
    multiple of 64, TypeError for one of another type.
    """
    _check(cu_seqlens, interval, slots, tokens, seen, null_index)
    device, sequences = cu_seqlens.device, cu_seqlens.shape[0] - 1
    kind = torch.int32 if slots is None else slots.dtype
    rows = tokens // interval + (0 if seen is None else sequences)
    if sequences == 0 or rows == 0:
        return torch.zeros((0, 3), dtype=kind, device=device)
    lengths = cu_seqlens.diff().long()
    before = torch.zeros_like(lengths) if seen is None else seen.long()
    first = before // interval  # boundaries that earlier calls have passed
    behind = ((before + lengths) // interval - first).cumsum(0)  # rows of the sequences up to each
    row = torch.arange(rows, device=device)
    owner = torch.searchsorted(behind, row, right=True)
    used = owner < sequences
    n = owner.clamp(max=sequences - 1)
    boundary = first[n] + row - behind[n - 1].masked_fill(n == 0, 0)  # counted from 0
    after = (boundary + 1) * interval - before[n]
    used &= (after % _CHUNK == 0) | (after == lengths[n])
    if slots is None:
        slot = row
    elif slots.shape[1] == 0:
        slot, used = torch.full_like(row, -1), torch.zeros_like(used)
    else:
        slot = slots[n, boundary.clamp(max=slots.shape[1] - 1)].long()
        used &= (boundary < slots.shape[1]) & (slot >= 0) & (slot != null_index)
    return _rows(n, after, slot, used).to(kind)


def one_state_each(tokens: Tensor, slots: Tensor | None = None, null_index: int = -1) -> Tensor:
    """A plan with a row for each sequence: its state after `tokens[n]` tokens goes to `slots[n]`, or to slot
    n. A negative number of tokens, or a slot that is negative or `null_index`, is no checkpoint."""
    n = torch.arange(tokens.shape[0], device=tokens.device)
    slot = n if slots is None else slots.long()
    return _rows(n, tokens.long(), slot, (tokens >= 0) & (slot >= 0) & (slot != null_index))


def _rows(n: Tensor, tokens: Tensor, slot: Tensor, used: Tensor) -> Tensor:
    # By masked_fill: a scalar operand of torch.where is copied to a GPU, which a CUDA graph does not take.
    unused = ~used
    columns = n.masked_fill(unused, 0), tokens.masked_fill(unused, 0), slot.masked_fill(unused, -1)
    return torch.stack(columns, dim=1)


def _check(
    cu_seqlens: Tensor, interval: int, slots: Tensor | None, tokens: int, seen: Tensor | None, null_index: int
) -> None:
    for name, value, shape in (
        ("cu_seqlens", cu_seqlens, "[N + 1]"), ("slots", slots, "[N, S]"), ("seen", seen, "[N]"),
    ):  # fmt: skip
        if value is None and name != "cu_seqlens":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"checkpoint_plan: {name} must be a tensor, got {_ops.type_name(value)}")
        if value.dim() != (2 if name == "slots" else 1):
            raise ValueError(f"checkpoint_plan: {name} must have shape {shape}, got {_ops.described(value)}")
        if value.dtype not in _INDICES:
            raise ValueError(f"checkpoint_plan: {name} must have dtype int32 or int64, got {value.dtype}")
        if value.device != cu_seqlens.device:
            raise ValueError(
                f"checkpoint_plan: {name} must be on cu_seqlens's device, {cu_seqlens.device}, "
                f"got {value.device}"
            )
    if cu_seqlens.shape[0] == 0:
        raise ValueError("checkpoint_plan: cu_seqlens must have N + 1 >= 1 elements, got 0")
    sequences = cu_seqlens.shape[0] - 1
    for name, value in (("slots", slots), ("seen", seen)):
        if value is not None and value.shape[0] != sequences:
            raise ValueError(
                f"checkpoint_plan: {name} must have a row for each of {sequences} sequences, "
                f"got {list(value.shape)}"
            )
    for name, number in (("interval", interval), ("tokens", tokens), ("null_index", null_index)):
        if not isinstance(number, int | torch.SymInt) or isinstance(number, bool):
            raise TypeError(f"checkpoint_plan: {name} must be of type int, got {_ops.type_name(number)}")
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            raise ValueError(f"checkpoint_plan: {name} must fit 64 bits, got {number}")
    if interval <= 0 or interval % _CHUNK:
        raise ValueError(
            f"checkpoint_plan: interval must be a positive multiple of {_CHUNK} tokens, got {interval}"
        )
    if tokens < 0:
        raise ValueError(f"checkpoint_plan: tokens must not be negative, got {tokens}")
