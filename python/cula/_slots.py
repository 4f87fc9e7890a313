# SPDX-License-Identifier: Apache-2.0
"""The slots of a pool in calls that name none: sequence n starts from slot n."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _ops


def first_slots(scales: Tensor | None, slots: int) -> Tensor | None:
    """The scales of a pool's first slots."""
    if scales is None or not _ops.is_dense(scales) or scales.dim() != 3:
        return scales  # absent, or refused with the other arguments
    return scales[:slots]


def of(
    q: Tensor, pool: Tensor, scales: Tensor | None, final_state_indices: Tensor | None, null_index: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The pool, its scales and the `state_indices` of a decode that is given no indices, where the pool has
    more slots than there are rows. The kernels take the first slots of it, or, where rows end in other slots,
    all of it with the numbers of the rows as indices.

    ValueError if `null_index` is the number of a row, which those indices would skip.
    """
    rows = q.shape[0]
    if final_state_indices is None:
        return pool[:rows], first_slots(scales, rows), None
    if isinstance(null_index, int) and 0 <= null_index < rows:
        raise ValueError(
            f"decode: state_indices must be given with final_state_indices and null_index = {null_index}, "
            f"the slot that row {null_index} would start from, got None"
        )
    return pool, scales, torch.arange(rows, dtype=torch.int32, device=q.device)
