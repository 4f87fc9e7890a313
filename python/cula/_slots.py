# SPDX-License-Identifier: Apache-2.0
"""Which slots of a pool the rows of a decode have that names none."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _passes


def of(
    q: Tensor, pool: Tensor, scales: Tensor | None, final_state_indices: Tensor | None, null_index: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The pool, its scales and the indices by which row n starts from slot n, of a pool with more slots than
    there are rows: its first slots and no indices, unless rows end in others."""
    rows = q.shape[0]
    if final_state_indices is None:
        return pool[:rows], _passes.first_slots(scales, rows), None
    if isinstance(null_index, int) and 0 <= null_index < rows:  # it would skip the row
        raise ValueError(
            f"decode: state_indices must be given with final_state_indices and null_index = {null_index}, "
            f"the slot that row {null_index} would start from, got None"
        )
    return pool, scales, torch.arange(rows, dtype=torch.int32, device=q.device)
