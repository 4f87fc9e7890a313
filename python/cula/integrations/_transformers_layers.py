# SPDX-License-Identifier: Apache-2.0
"""What the model files of transformers have around linear attention, on the kernels here: the short
convolution, its next token, and the norms.

Each function takes what that of transformers takes, and raises ValueError, TypeError or NotImplementedError
before it has run where transformers' own code should.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .. import _layers, conv, norm

# Of a norm's weight and of x, in which a class of norms may return what the other rounds.
_DTYPES = (
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)

ON_GPU = "on other devices than CPUs transformers' own code is kept for the layers around"


def _need_kernel(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError(ON_GPU)
    if not _layers.takes(x):
        raise NotImplementedError(
            f"takes float32, bfloat16 and float16; these are {str(x.dtype).removeprefix('torch.')}"
        )


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: object,
) -> Tensor:
    """`[B, D, T]`. Where a batch is packed, its sequences are kept apart, on every device."""
    lengths = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if lengths is None and seq_idx is None:
        _need_kernel(hidden_states)
    if lengths is not None:
        # What a cache has put in front belongs to the first sequence.
        lengths = lengths + (hidden_states.shape[2] - lengths[-1:])
        lengths = torch.cat([torch.zeros_like(lengths[:1]), lengths[1:]])
    y = conv.causal_conv1d_fn(
        hidden_states, weight, bias, seq_idx if lengths is None else None, activation=activation,
        query_start_loc=lengths,
    )  # fmt: skip
    assert isinstance(y, Tensor)  # no states were asked for
    return y


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`[B, D, T]`, the cache's own tensor updated in place."""
    _need_kernel(hidden_states)
    return conv.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class _Norm(Protocol):
    """What the classes of norms have: `variance_epsilon`, or `eps` where the weight is `1 + weight`."""

    weight: Tensor
    variance_epsilon: float
    eps: float


def norm_like(place: type[torch.nn.Module]) -> Callable[..., Tensor] | None:
    """The forward of a class of norms by the kernel here, if it computes what that class does: both are tried
    on a small example. Files of transformers have norms that gate first, that have groups, or whose weight is
    `1 + weight`, under names that say nothing of it."""
    gated = place.__name__.endswith("Gated")
    forms: list[Callable[..., Tensor]] = [_gated_forward]
    if not gated:
        either = (False, True)
        forms = [functools.partial(_forward, centered, widens) for centered in either for widens in either]
    return next((ours for ours in forms if _agrees(place, ours, gated)), None)


def _epsilon(layer: _Norm) -> float:
    eps: float = layer.variance_epsilon if hasattr(layer, "variance_epsilon") else layer.eps
    return eps


def _gated_forward(layer: _Norm, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    _need_kernel(hidden_states)
    activation: str = layer.activation  # type: ignore[attr-defined]
    y = norm.rms_norm_gated(hidden_states, gate, layer.weight, activation=activation, eps=_epsilon(layer))
    assert isinstance(y, Tensor)  # without prenorm
    return y


def _forward(zero_centered: bool, widens: bool, layer: _Norm, hidden_states: Tensor) -> Tensor:
    """widens: the result has the wider of x's and the weight's dtypes, not x's."""
    _need_kernel(hidden_states)
    if not _layers.takes(layer.weight):
        raise NotImplementedError(f"weight has dtype {layer.weight.dtype}")
    if widens:
        hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, layer.weight.dtype))
    return _layers.norm(hidden_states, None, layer.weight, eps=_epsilon(layer), zero_centered=zero_centered)


def _agrees(place: type[torch.nn.Module], ours: Callable[..., Tensor], gated: bool) -> bool:
    """Whatever the class raises on the example, it is then none that is known here."""
    numbers = torch.linspace(-2.0, 3.0, 32, dtype=torch.float32, device="cpu").view(4, 8)
    inputs = (numbers, numbers.flip(0) * 0.7) if gated else (numbers,)
    try:
        with torch.device("cpu"), torch.no_grad():
            layer = place(8, eps=0.25).float()
            layer.weight.copy_(numbers[1])  # type: ignore[operator]
            if not torch.allclose(ours(layer, *inputs), layer.forward(*inputs), rtol=1e-4, atol=1e-5):
                return False
            for of_weight, of_x in _DTYPES:
                layer, given = layer.to(of_weight), [x.to(of_x) for x in inputs]
                if ours(layer, *given).dtype != layer.forward(*given).dtype:
                    return False
            return True
    except Exception:
        return False
