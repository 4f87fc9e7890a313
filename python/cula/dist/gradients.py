# SPDX-License-Identifier: Apache-2.0
"""Derivatives of what goes over several ranks.

A call is one node of every rank's graph, its own backward pass a call of all ranks. The gradients are those
of the sum of what all ranks differentiate. All ranks have the node or none has it: where gradients are
enabled and can be computed, and ranks wait for each other, each says in one byte whether its inputs require
any, and where those of one do, the results of all do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from .. import _autograd
from .calls import Call
from .forms import Form
from .methods import Kept, Upstream
from .transport import Transport


def run(form: Form, call: Call, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(o, final states) of the call, with derivatives where a rank asks for them."""
    tensors = call.read()
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    if not _needed(form, call, tensors):
        o, final, _ = form.forward(call, initial_state)
        return o, final
    anchor = _anchor(call.q, tensors.values())
    return _ContextParallel.apply(form, call, tuple(tensors), anchor, *tensors.values())


def _needed(form: Form, call: Call, tensors: dict[str, Tensor]) -> bool:
    """Whether a call of all ranks has derivatives. NotImplementedError where tensors require gradients and
    have none."""
    if not torch.is_grad_enabled():
        return False
    wanted = [name for name, x in tensors.items() if x.requires_grad]
    given, anywhere = call.without_tokens().operands(), bool(wanted)
    if form.exchanges and _autograd.has_backend(given):
        anywhere = on_any_rank(form.transport, anywhere, call.q)
    if wanted:
        _autograd.refuse_untrained(call.name, wanted)
        _autograd.backend(call.name, {**given, "initial_state": tensors.get("initial_state")})
    if anywhere and call.options.get("out") is not None:
        raise NotImplementedError(
            f"{call.name}: {wanted[0] if wanted else 'an input of another rank'} requires gradients, and a "
            "call that writes into out has none: call without, or call under torch.no_grad() or "
            "torch.inference_mode()"
        )
    return anywhere


def on_any_rank(transport: Transport, here: bool, like: Tensor) -> bool:
    """Whether it is `here` on any rank. A rank that knows it itself does not wait for the others' answer."""
    if transport.size == 1:
        return here
    answers = transport.all_gather(torch.full((1,), here, dtype=torch.uint8, device=like.device))
    return here or bool(answers.any())


def _anchor(like: Tensor, tensors: Iterable[Tensor]) -> Tensor | None:
    """What makes the results require gradients where no input does."""
    if any(x.requires_grad for x in tensors):
        return None
    return torch.empty(0, device=like.device, requires_grad=True)


class _Context(Protocol):
    """What autograd hands to both directions of a call, and what a call keeps there."""

    form: Form
    call: dict[str, Any]
    names: tuple[str, ...]
    transport: Transport
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _ContextParallel(Function):
    """It keeps the inputs, the states that came from the ranks before, and of a scan the M of the rank's
    tokens, where the rank has others on both sides."""

    @staticmethod
    def forward(
        ctx: _Context,
        form: Form,
        call: Call,
        names: tuple[str, ...],
        _anchor: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        made = form.forward(call, dict(zip(names, tensors, strict=True)).get("initial_state"))
        ctx.form, ctx.names = form, names
        plain = {name: x for name, x in call.options.items() if name not in names}
        ctx.call = {"name": call.name, "mode": call.mode, "options": plain}
        state, m = made.kept
        if m is not None:  # without the rest of its message
            m = m.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(*tensors, state, m)
        ctx.set_materialize_grads(False)
        return made.o, made.final_state

    @staticmethod
    def backward(ctx: _Context, d_o: Tensor | None, d_final_state: Tensor | None) -> object:
        *tensors, state, m = ctx.saved_tensors
        given = dict(zip(ctx.names, tensors, strict=True))
        _, _, _, _, *needs = ctx.needs_input_grad
        wanted = {name for name, need in zip(ctx.names, needs, strict=True) if need}
        call = Call(**ctx.call, q=given["q"], k=given["k"], v=given["v"]).reading(given)
        with torch.no_grad():
            gradients = ctx.form.backward(
                call, given.get("initial_state"), Kept(state, m), Upstream(d_o, d_final_state, wanted)
            )  # fmt: skip
        made: dict[str, Tensor | None] = {name: gradients[name].to(given[name].dtype) for name in wanted}
        if torch.is_grad_enabled():
            made = _autograd.differentiated_once(made, [*tensors, state, d_o, d_final_state])
        return None, None, None, None, *(made.get(name) for name in ctx.names)


def all_gather_heads(
    call: Call, transport: Transport, o: Tensor, final_state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """All ranks' heads of o, `[B, T, heads, V]`, and of states `[N, heads, V, K]`."""
    built = torch.is_grad_enabled() and _autograd.has_backend(call.without_tokens().operands())
    own = (o,) if final_state is None else (o, final_state)
    all_o, *final = all_gather(transport, *own) if built else map(transport.all_gather, own)
    return along(all_o, 2), along(final[0], 1) if final else None


def along(gathered: Tensor, dim: int) -> Tensor:
    """Every rank's, one after the other along `dim`."""
    return torch.cat(gathered.unbind(0), dim)


def all_gather(transport: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Every rank's: `[size, *x.shape]` of each x, with derivatives where a rank asks for them."""
    first, here = tensors[0], any(x.requires_grad for x in tensors)
    if not (torch.is_grad_enabled() and on_any_rank(transport, here, first)):
        return tuple(map(transport.all_gather, tensors))
    return _AllGather.apply(transport, _anchor(first, tensors), *tensors)


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: _Context, transport: Transport, _anchor: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transport = transport
        return tuple(map(transport.all_gather, tensors))

    @staticmethod
    def backward(ctx: _Context, *d_gathered: Tensor) -> object:
        with torch.no_grad():
            made = [_summed(ctx.transport, d) for d in d_gathered]
        if torch.is_grad_enabled():
            once = _autograd.differentiated_once(dict(enumerate(made)), d_gathered)
            return None, None, *once.values()
        return None, None, *made


def _summed(transport: Transport, d_gathered: Tensor) -> Tensor:
    """What all ranks say of this rank's part."""
    wide = torch.promote_types(d_gathered.dtype, torch.float32)
    return transport.exchange(d_gathered).sum(0, dtype=wide).to(d_gathered.dtype)
