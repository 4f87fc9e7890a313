# SPDX-License-Identifier: Apache-2.0
"""The operators of what hybrid layers have around linear attention: `torch.ops.cula.causal_conv1d`,
`causal_conv1d_update` and `rms_norm_gated`, on CPUs (bindings/torch/layers.cc).

Here are their fakes and derivatives. `convolve`, `convolve_step` and `norm` call them as the package does:
without what PyTorch spends on derivatives where nothing requires any. x of a convolution is `[B, T, D]` here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import _autograd, _ops
from ._library import ops, unchecked

# What the kernels take; another dtype or device goes through the plain forms of `cula._plain`.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_any_requires_grad = torch._C._any_requires_grad


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors, the optional ones of a call among them."""
    for x in tensors:  # noqa: SIM110 (a generator takes longer than the checks)
        if x is not None and not (x.is_cpu and x.dtype in DTYPES):
            return False
    return True


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    silu: bool = False,
    final_state_len: int = 0,
) -> tuple[Tensor, Tensor | None]:
    made: tuple[Tensor, Tensor | None] = _operator("causal_conv1d", x, weight, bias, initial_state)(
        x, weight, bias, initial_state, cu_seqlens, seq_idx, silu, final_state_len
    )
    return made


def convolve_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
    conv_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    null_index: int = -1,
) -> Tensor:
    run = _operator("causal_conv1d_update", x, conv_state, weight, bias)
    made: Tensor = run(
        x, conv_state, weight, bias, silu, conv_state_indices, cu_seqlens, cache_seqlens, num_accepted_tokens,
        null_index,
    )  # fmt: skip
    if run is _UNCHECKED["causal_conv1d_update"]:
        increment_version(conv_state)
    return made


def norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    sigmoid: bool = False,
    norm_before_gate: bool = True,
    group_size: int = 0,
    zero_centered: bool = False,
) -> Tensor:
    made: Tensor = _operator("rms_norm_gated", x, gate, weight, bias)(
        x, gate, weight, bias, eps, sigmoid, norm_before_gate, group_size, zero_centered
    )
    return made


_CHECKED: dict[str, torch._ops.OpOverload] = {}
_UNCHECKED: dict[str, Callable[..., Any]] = {}


def _operator(name: str, *tensors: Tensor | None) -> Callable[..., Any]:
    if is_compiling():
        return _CHECKED[name]
    if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_grad(*tensors)):
        return _CHECKED[name]
    return _UNCHECKED[name]


# Fakes


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_tokens(x: Tensor) -> Tensor:
    """Dense, with tokens contiguous where those of x are and its channels are not."""
    if x.dim() != 3:
        raise ValueError(f"causal_conv1d: x must have shape [B, T, D], got {list(x.shape)}")
    if x.stride(2) == 1 or x.stride(1) != 1:
        return _dense(x)
    return _dense(x.transpose(1, 2)).transpose(1, 2)


def _fake_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    silu: bool = False,
    final_state_len: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    y = _like_tokens(x)
    if not final_state_len:
        return y, None
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return y, x.new_empty((sequences, x.shape[2], final_state_len))


def _fake_gradients(of: tuple[Tensor | None, ...], wanted: int) -> list[Tensor | None]:
    return [None if x is None or not wanted >> row & 1 else _dense(x) for row, x in enumerate(of)]


def _fake_conv_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    d_y: Tensor | None,
    d_final_state: Tensor | None,
    gradients: int,
    backend: str | None = None,
) -> tuple[Tensor | None, ...]:
    rest = _fake_gradients((None, weight, bias, initial_state), gradients)
    return (_like_tokens(x) if gradients & 1 else None, *rest[1:])


def _fake_update(x: Tensor, *_: object, **__: object) -> Tensor:
    return _like_tokens(x)


def _fake_norm(x: Tensor, *_: object, **__: object) -> Tensor:
    return _dense(x)


def _fake_norm_backward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    sigmoid: bool,
    norm_before_gate: bool,
    group_size: int,
    zero_centered: bool,
    d_y: Tensor,
    gradients: int,
    backend: str | None = None,
) -> tuple[Tensor | None, ...]:
    return tuple(_fake_gradients((x, gate, weight, bias), gradients))


# Derivatives


class _Context(Protocol):
    """What autograd hands to both directions of a call, and what a call keeps there."""

    tensors: tuple[int, ...]
    given: list[Any]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _keep(ctx: _Context, inputs: tuple[Any, ...]) -> None:
    """Saves the inputs and nothing besides: the backward pass computes the rest again."""
    ctx.tensors = tuple(at for at, value in enumerate(inputs) if isinstance(value, Tensor))
    ctx.given = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*(inputs[at] for at in ctx.tensors))
    ctx.set_materialize_grads(False)


def _inputs(ctx: _Context) -> list[Any]:
    given = list(ctx.given)
    for at, value in zip(ctx.tensors, ctx.saved_tensors, strict=True):
        given[at] = value
    return given


def _wanted(ctx: _Context) -> int:
    """A bit for each of the first four inputs that requires a gradient."""
    return sum(1 << row for row in range(4) if row in ctx.tensors and ctx.needs_input_grad[1 + row])


def _hand_out(ctx: _Context, made: tuple[Tensor | None, ...], *of: Tensor | None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        named = _autograd.differentiated_once(dict(enumerate(made)), [*ctx.saved_tensors, *of])
        made = tuple(named[row] for row in range(len(made)))
    return (*made, *[None] * (len(ctx.given) - len(made)))


def _conv_backward(ctx: _Context, d_y: Tensor | None, d_final_state: Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, initial, cu_seqlens, seq_idx, silu, _, backend = _inputs(ctx)
    with torch.no_grad():
        made = ops.causal_conv1d_backward(
            x, weight, bias, initial, cu_seqlens, seq_idx, silu, d_y, d_final_state, _wanted(ctx), backend
        )
    return _hand_out(ctx, made, d_y, d_final_state)


def _norm_backward(ctx: _Context, d_y: Tensor | None) -> tuple[Any, ...]:
    *given, backend = _inputs(ctx)
    if d_y is None:
        return (None,) * len(ctx.given)
    with torch.no_grad():
        made = ops.rms_norm_gated_backward(*given, d_y, _wanted(ctx), backend)
    return _hand_out(ctx, made, d_y)


def _differentiable(
    op: torch._ops.OpOverload, gradients: Callable[..., tuple[Any, ...]]
) -> Callable[..., object]:
    """What PyTorch runs in place of an operator that has a backward pass."""

    def run(keys: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> object:
        return op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments, **named)

    class Derivatives(Function):
        @staticmethod
        def forward(ctx: _Context, keys: torch._C.DispatchKeySet, *arguments: Any) -> object:
            _keep(ctx, arguments)
            return run(keys, *arguments)

        @staticmethod
        def backward(ctx: _Context, *upstream: Tensor | None) -> object:
            return None, *gradients(ctx, *upstream)

    def call(keys: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> object:
        if forward_ad._current_level >= 0:
            _autograd.refuse_tangents(op, arguments, named)
        if not (torch.is_grad_enabled() and _any_requires_grad(*arguments, *named.values())):
            return run(keys, *arguments, **named)
        schema = op._schema.arguments
        rest = (named.get(each.name, each.default_value) for each in schema[len(arguments) :])
        everything = (*arguments, *rest)
        wanted = [each.name for each, x in zip(schema, everything, strict=True) if _any_requires_grad(x)]
        _autograd.refuse_transforms(_ops.op_name(op), wanted)
        return Derivatives.apply(keys, *everything)

    return call


def _register() -> None:
    fakes: dict[str, Callable[..., object]] = {
        "causal_conv1d": _fake_conv,
        "causal_conv1d_backward": _fake_conv_backward,
        "causal_conv1d_update": _fake_update,
        "rms_norm_gated": _fake_norm,
        "rms_norm_gated_backward": _fake_norm_backward,
    }
    backwards: dict[str, Callable[..., tuple[Any, ...]]] = {
        "causal_conv1d": _conv_backward,
        "rms_norm_gated": _norm_backward,
    }
    for name, fake in fakes.items():
        op = getattr(ops, name).default
        twin = getattr(unchecked, name).default
        _CHECKED[name] = op
        _UNCHECKED[name] = twin._op
        gradients = backwards.get(name)
        _ops.register_layer(op, twin, fake, gradients and _differentiable(op, gradients))


_register()
