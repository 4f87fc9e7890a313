# SPDX-License-Identifier: Apache-2.0
"""The short convolution and the gated RMSNorm as their papers write them, sequence by sequence, in the dtype
of the inputs: in float64 the oracle of the kernels, in a lower precision their budget. Differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from cula_testing import device

# They have no use for AMX.
TARGETS = [
    target
    for target in device.able(torch.bfloat16, on="cpu")
    if target.startswith("cpu:") and target != "cpu:amx"
]


def convolve_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, act: bool, columns: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens `[D, T]` of one sequence, behind those of its state `[D, S]`; and the last `columns` of both."""
    width = weight.shape[1]
    seen = x if state is None else torch.cat([state.to(x.dtype), x], 1)
    missing = max(width - 1 + x.shape[1], columns) - seen.shape[1]
    seen = pad(seen, (max(missing, 0), 0))
    window = seen[:, seen.shape[1] - (width - 1 + x.shape[1]) :]
    y = x.clone()
    if x.shape[1]:
        # PyTorch's own convolution of 5 channels and 16 columns in float16 does not return where oneDNN has
        # AVX512-FP16 (PyTorch 2.13). Sums, as there, are at least float32.
        wide = torch.promote_types(x.dtype, torch.float32)
        y = (window.to(wide).unfold(1, width, 1) * weight.to(wide)[:, None]).sum(-1)
        y = (y if bias is None else y + bias.to(wide)[:, None]).to(x.dtype)
        y = silu(y) if act else y
    return y, seen[:, seen.shape[1] - columns :]


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    act: bool = True,
    columns: int = 0,
) -> tuple[Tensor, Tensor]:
    """x `[B, D, T]`; of a packed batch the lengths of its sequences, behind which y is 0."""
    if lengths is None:
        parts = [x[n] for n in range(len(x))]
    else:
        parts = list(x[0, :, : sum(lengths)].split(list(lengths), 1))
    made = [
        convolve_one(part, weight, bias, None if state is None else state[n], act, columns)
        for n, part in enumerate(parts)
    ]
    final = torch.stack([each for _, each in made])
    if lengths is None:
        return torch.stack([y for y, _ in made]), final
    y = torch.cat([y for y, _ in made], 1)
    return pad(y, (0, x.shape[2] - y.shape[1]))[None], final


def gated_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str = "swish",
    norm_before_gate: bool = True,
    group: int | None = None,
) -> Tensor:
    act = None if gate is None else torch.sigmoid(gate) if activation == "sigmoid" else silu(gate)
    y = x if act is None or norm_before_gate else x * act
    group = group or y.shape[-1]
    groups = y.reshape(*y.shape[:-1], y.shape[-1] // group, group)
    y = (groups / (groups.pow(2).mean(-1, keepdim=True) + eps).sqrt()).reshape(x.shape)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y * act if act is not None and norm_before_gate else y
