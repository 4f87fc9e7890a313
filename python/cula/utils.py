# SPDX-License-Identifier: Apache-2.0
"""cuLA's selector of a prefill function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kda import kda_prefill_hopper

__all__ = ["get_kda_fused_fwd"]


def get_kda_fused_fwd(
    device: torch.device | str | None = None,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The KDA prefill for a device: one function serves all, since it dispatches on its tensors."""
    return kda_prefill_hopper
