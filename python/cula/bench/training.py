# SPDX-License-Identifier: Apache-2.0
"""The passes of training: `train`, a forward and a backward pass through autograd, and `backward` alone.

A call of either returns the gradients of its inputs by name. The loss is of o: a step of training has no
initial state and asks for no final one. Decays per head are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from .. import _ops
from .cases import Inputs, Maybe
from .measure import Call

Gradients = dict[str, torch.Tensor]
# One call on inputs that require gradients; returns o.
Forward = Callable[[Inputs], torch.Tensor]


@dataclass
class Step(Inputs):
    """The tensors of one step: a call's, and the gradient of o that the loss hands back."""

    d_o: Maybe = None

    TENSORS: ClassVar[tuple[str, ...]] = (*Inputs.TENSORS, "d_o")

    def call(self) -> Inputs:
        return Inputs(**{each.name: getattr(self, each.name) for each in fields(Inputs)})


def step_inputs(inputs: Inputs) -> Step:
    call = {each.name: getattr(inputs, each.name) for each in fields(Inputs)}
    draw = torch.Generator(inputs.v.device).manual_seed(inputs.case.seed + 1)
    d_o = torch.randn(inputs.o_shape, generator=draw, device=inputs.v.device).to(inputs.v.dtype)
    return Step(**call, d_o=d_o)


def names(inputs: Inputs) -> list[str]:
    """What a step has the gradients of."""
    return [name for name in _ops.GRADIENTS if name != "decay" and getattr(inputs, name) is not None]


def _leaves(inputs: Step) -> Step:
    """The same memory, from which gradients are asked."""
    return inputs.but(**{name: getattr(inputs, name).detach().requires_grad_() for name in names(inputs)})


def bind(pass_name: str, inputs: Inputs, forward: Forward) -> Call:
    """Of a `Step`. `backward` goes back through one forward pass again and again, whose graph is kept."""
    assert isinstance(inputs, Step)
    d_o = inputs.d_o
    leaves, wanted = _leaves(inputs), names(inputs)
    of = [getattr(leaves, name) for name in wanted]

    def ahead() -> torch.Tensor:
        with torch.enable_grad():
            return forward(leaves)

    def back(o: torch.Tensor, *, again: bool) -> Gradients:
        return dict(zip(wanted, torch.autograd.grad(o, of, d_o, retain_graph=again), strict=True))

    if pass_name == "train":
        return lambda: back(ahead(), again=False)
    o = ahead()
    return lambda: back(o, again=True)


def found(bound: Callable[[Inputs], Call], prepare: Callable[[Inputs], Inputs], inputs: Step) -> Gradients:
    """What a bound call finds, as gradients of the inputs themselves: what an implementation wants prepared
    is differentiated by PyTorch."""
    leaves = _leaves(inputs)
    with torch.enable_grad():
        given = prepare(leaves)
    made: Gradients = bound(given.map(torch.Tensor.detach))()
    if given is leaves:
        return made
    wanted = names(inputs)
    ends = torch.autograd.grad(
        [getattr(given, name) for name in made],
        [getattr(leaves, name) for name in wanted],
        list(made.values()),
    )
    return dict(zip(wanted, ends, strict=True))
