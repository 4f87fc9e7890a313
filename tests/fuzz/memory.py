# SPDX-License-Identifier: Apache-2.0
"""How tensors lie in memory: views with gaps of poison, their copies on a device, and what a call left
unchanged."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cula_testing.compare import bits
from fuzz.case import Case

NAN = float("nan")
POISONED_INDEX = 1 << 30


def poison(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), NAN if dtype.is_floating_point else POISONED_INDEX, dtype=dtype)


def place(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of x in memory of their own, as `layout` says; a dimension of stride 0 keeps it."""
    core = x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            core = core.narrow(dim, 0, 1)
    match layout:
        case "padded" | "odd":
            before, after = (8, 16) if layout == "padded" else (1, 2)
            width = core.shape[-1]
            view = poison((*core.shape[:-1], before + width + after), x.dtype)[..., before : before + width]
        case "by_head":
            view = poison(core.transpose(1, 2).shape, x.dtype).transpose(1, 2)
        case "by_token":
            view = poison(core.transpose(0, 1).shape, x.dtype).transpose(0, 1)
        case "fused":  # the heads of a token lie together, in a wider row
            row = core.shape[2:].numel()
            view = poison((*core.shape[:2], row + 40), x.dtype)[..., 16 : 16 + row].unflatten(
                -1, core.shape[2:]
            )
        case _:
            view = poison(core.shape, x.dtype)
    return view.copy_(core).expand(x.shape)


def place_indices(x: torch.Tensor, strided: bool) -> torch.Tensor:
    """One column of a wider table, or the first columns of one."""
    if not strided:
        return x
    if x.ndim == 1:
        return poison((*x.shape, 3), x.dtype)[:, 1].copy_(x)
    return poison((x.shape[0], x.shape[1] + 2), x.dtype)[:, : x.shape[1]].copy_(x)


def place_states(case: Case, lead: tuple[int, ...], dtype: str, v_first: bool = True) -> torch.Tensor:
    """Poisoned states [*lead, HV, V, K], in the case's layout, with gaps between slots and between heads."""
    by_row = case.v_first != case.transposed  # K is contiguous
    inner = (case.value_dim, case.key_dim) if by_row else (case.key_dim, case.value_dim)
    head = inner[0] * inner[1] + case.head_pad
    slot = case.value_heads * head + case.slot_pad
    memory = poison((*lead, slot), getattr(torch, dtype))
    heads = memory[..., : case.value_heads * head].unflatten(-1, (case.value_heads, head))
    states = heads[..., : inner[0] * inner[1]].unflatten(-1, inner)
    return states if by_row == v_first else states.mT


def whole(x: torch.Tensor) -> torch.Tensor:
    """All the memory under a view, on the CPU."""
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(
        storage, 0, (storage.nbytes() // x.element_size(),)
    )
    return flat.cpu()


def fresh(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides and the same gaps."""
    flat = whole(x)
    flat = flat.clone() if device == "cpu" else flat.to(device)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def changed_outside(before: torch.Tensor, after: torch.Tensor, view: torch.Tensor, named: list) -> int:
    """How many elements of the memory under `view` changed, except at view[index] for the indices that are
    named."""
    differ = bits(before) != bits(after)
    if named and differ.any():
        inside = differ.as_strided(view.shape, view.stride(), view.storage_offset())
        for index in named:
            inside[index] = False
    return int(differ.sum())
