# SPDX-License-Identifier: Apache-2.0
"""States of float8_e4m3fn by PyTorch's own conversions: the rule that pools are stored by."""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn


def quantised(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of float32 states `[..., V, K]`."""
    most = states.abs().amax(-1)
    largest = torch.full_like(most, 448.0)  # by a number, a GPU multiplies by its rounded inverse
    scales, inverse = most / largest, largest / most
    zero = scales < torch.finfo(torch.float32).tiny
    scales, inverse = scales.masked_fill(zero, 0.0), inverse.masked_fill(zero, 0.0)
    broken = ~states.isfinite().all(-1)
    scales, inverse = (x.masked_fill(broken, float("nan")) for x in (scales, inverse))
    return (states * inverse[..., None]).to(FLOAT8), scales


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales[..., None]


def pool_of(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float8 pool in the layout and with the strides of a float32 one, and its scales."""
    codes, scales = quantised(states)
    size = 1 + sum(
        (length - 1) * stride for length, stride in zip(states.shape, states.stride(), strict=True)
    )
    memory = torch.full((size,), 0x7F, dtype=torch.uint8, device=states.device)
    pool = memory.as_strided(states.shape, states.stride())
    pool.copy_(codes.view(torch.uint8))
    return pool.view(FLOAT8), scales


def at(pool: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Slots of a float8 pool, by its bytes: not every device indexes the dtype."""
    return pool.view(torch.uint8)[slots].view(FLOAT8)


def assert_stored(codes: torch.Tensor, scales: torch.Tensor, states: torch.Tensor) -> None:
    """Codes and scales are those of the float32 states `[..., V, K]`: scales to their last bit, codes to a
    step of the format where a number lies at the border between two."""
    wanted, wanted_scales = quantised(states)
    assert torch.equal(scales.isnan(), wanted_scales.isnan())
    off = (scales - wanted_scales).abs().nan_to_num()
    assert (off <= 2**-23 * wanted_scales.abs().nan_to_num()).all(), f"scales: off by {float(off.max())}"
    stored, exact = codes.view(torch.uint8), wanted.view(torch.uint8)
    differ = stored != exact
    if not differ.any():
        return
    step = (stored.to(torch.int16) - exact.to(torch.int16)).abs()  # neighbours of one sign are one apart
    assert step.max() <= 1, f"{int((step > 1).sum())} codes are further than one step from their number"
    # Only ties, as far as float32 shows them: the middle of two codes, to the last bits of the product.
    numbers = states.double() / wanted_scales.double()[..., None]
    middle = (codes.double() + wanted.double()) / 2
    distance = (numbers - middle).abs()[differ] / numbers.abs()[differ]
    assert distance.max() <= 2**-21, f"a number {float(distance.max()):.1e} from the border is rounded away"
