# SPDX-License-Identifier: Apache-2.0
"""States of float8_e4m3fn outside of a call: made of states in a wider dtype, read, and with an engine's
scales (docs/api.md, "States in eight bits")."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _ops

FLOAT8 = torch.float8_e4m3fn
_LARGEST = 448.0
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def quantize_states(states: Tensor, state_v_first: bool = True) -> tuple[Tensor, Tensor]:
    """What a pool of float8 holds for these states: codes, and `state_scales`.

    states: `[..., V, K]` in float32, bfloat16 or float16; `[..., K, V]` with `state_v_first=False`.

    Returns the codes, float8_e4m3fn in the shape of `states`, and a float32 scale for each row, `[..., V]`:
    `amax / 448` of its K numbers, and what the library stores where a row is zero or not finite. On a CPU the
    codes are those that the kernels store, to their last bit.

    Raises TypeError for what is no tensor or no bool, ValueError for another dtype or fewer than two
    dimensions.
    """
    _check_matrix("quantize_states", "states", states, _WIDE, state_v_first)
    rows = (states if state_v_first else states.transpose(-1, -2)).float()
    most = rows.abs().amax(-1, keepdim=True)
    largest = torch.full_like(most, _LARGEST)  # by a number, a GPU multiplies by its rounded inverse
    scales, inverse = most / largest, largest / most
    stored_as_zero = scales < torch.finfo(torch.float32).tiny
    scales, inverse = (x.masked_fill(stored_as_zero, 0.0) for x in (scales, inverse))
    broken = ~(most <= torch.finfo(torch.float32).max)
    scales, inverse = (x.masked_fill(broken, float("nan")) for x in (scales, inverse))
    codes = (rows * inverse).to(FLOAT8)
    return codes if state_v_first else codes.transpose(-1, -2), scales.squeeze(-1)


def dequantize_states(codes: Tensor, state_scales: Tensor, state_v_first: bool = True) -> Tensor:
    """The states, float32 in the shape of `codes`, that a pool of float8 holds.

    codes: float8_e4m3fn `[..., V, K]`; `[..., K, V]` with `state_v_first=False`.
    state_scales: float32 `[..., V]`.

    Raises TypeError for what is no tensor or no bool, ValueError for another dtype or shape.
    """
    _check_matrix("dequantize_states", "codes", codes, (FLOAT8,), state_v_first)
    if not isinstance(state_scales, Tensor):
        raise TypeError(
            f"dequantize_states: state_scales must be a tensor, got {_ops.type_name(state_scales)}"
        )
    wanted = (*codes.shape[:-2], codes.shape[-2 if state_v_first else -1])
    if state_scales.dtype != torch.float32 or state_scales.shape != wanted:
        raise ValueError(
            f"dequantize_states: state_scales must be float32 of shape {list(wanted)}, "
            f"got {state_scales.dtype} of {list(state_scales.shape)}"
        )
    return codes.float() * state_scales.unsqueeze(-1 if state_v_first else -2)


def expand_state_scales(scales: Tensor, value_dim: int) -> Tensor:
    """A scale for each row, of an engine's scales for several rows.

    scales: float32 `[slots, HV, R]`, where each scale holds for V / R neighbouring value channels and all key
        channels, such as one for 32; `[slots, HV, R, 1]` likewise. A scale for a head is `[slots, HV, 1]`.
    value_dim: V, a multiple of R.

    Returns new memory, float32 `[slots, HV, V]`, to be read and written as `state_scales`: calls choose a
    scale for each row where they store it, which one scale for several rows could not hold.

    Raises TypeError for what is no tensor, ValueError for another dtype or shape.
    """
    if not isinstance(scales, Tensor):
        raise TypeError(f"expand_state_scales: scales must be a tensor, got {_ops.type_name(scales)}")
    given = scales.squeeze(-1) if scales.dim() == 4 and scales.shape[-1] == 1 else scales
    if given.dim() != 3 or scales.dtype != torch.float32:
        raise ValueError(
            f"expand_state_scales: scales must be float32 of shape [slots, HV, R], "
            f"got {scales.dtype} of {list(scales.shape)}"
        )
    rows = given.shape[-1]
    if isinstance(value_dim, bool) or not isinstance(value_dim, int):
        raise TypeError(
            f"expand_state_scales: value_dim must be of type int, got {_ops.type_name(value_dim)}"
        )
    if rows == 0 or value_dim <= 0 or value_dim % rows:
        raise ValueError(f"expand_state_scales: value_dim must be a multiple of R = {rows}, got {value_dim}")
    return given.repeat_interleave(value_dim // rows, dim=-1)


def _check_matrix(
    function: str, argument: str, value: object, dtypes: tuple[torch.dtype, ...], state_v_first: object
) -> None:
    if not isinstance(state_v_first, bool):
        raise TypeError(
            f"{function}: state_v_first must be of type bool, got {_ops.type_name(state_v_first)}"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {argument} must be a tensor, got {_ops.type_name(value)}")
    if value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{function}: {argument} must have dtype {names}, got {value.dtype}")
    if not _ops.is_dense(value) or value.dim() < 2:
        raise ValueError(f"{function}: {argument} must have shape [..., V, K], got {_ops.described(value)}")
