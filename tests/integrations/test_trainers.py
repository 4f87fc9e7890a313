# SPDX-License-Identifier: Apache-2.0
"""The calls of Megatron-LM and torchtitan through `cula.integrations.fla`: they run on this library as they
are, with gradients, by the error rule; and twice they give the same bits."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cula.integrations import fla
from cula_testing import fla_stand_in, gradients, passes
from cula_testing.cases import Inputs, make
from cula_testing.compare import assert_accurate
from cula_testing.trainers import TRAINERS, Trainer

LAYOUTS = {"batch": ((150, 150), False), "packed": ((70, 1, 130, 64), True)}

Found = tuple[torch.Tensor, gradients.Gradients]


@pytest.fixture(params=["0.5", "0.6"])
def functions(request, monkeypatch):
    """The names of a framework's module, which imported FLA's functions before cula was registered."""
    fla_stand_in.install(monkeypatch, request.param)
    monkeypatch.delenv("FLA_CULA", raising=False)
    framework = ModuleType("framework")
    for each in TRAINERS.values():
        setattr(framework, each.name, getattr(sys.modules[f"fla.ops.{each.operation}"], each.name))
    monkeypatch.setitem(sys.modules, "framework", framework)
    fla.calls.clear()
    fla.register()
    yield vars(framework)
    fla.unregister()
    fla.calls.clear()


def inputs_of(trainer: Trainer, layout: str, dtype: torch.dtype) -> Inputs:
    lengths, packed = LAYOUTS[layout]
    case = trainer.case.but(lengths=lengths, packed=packed, dtype=dtype)
    bounds = torch.int64 if dtype == torch.float32 else torch.int32  # either may be given
    return trainer.prepare(make(case.but(cu_dtype=bounds)))


def step(functions, trainer: Trainer, inputs: Inputs, around=None) -> Found:
    """o, and the gradients of what the framework's call was given. `around` makes the call on tensors."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in gradients.names(inputs)}

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        given = inputs.but(**dict(zip(leaves, tensors, strict=True)))
        o, state = trainer.call(functions[trainer.name], given, None)
        assert state is None
        return o

    o = call(*leaves.values()) if around is None else around(call, *leaves.values())
    o.backward(gradients.upstream(inputs)[0])
    return o.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def assert_same_bits(one: Found, other: Found) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_call_runs_here_with_gradients(functions, name, layout, dtype):
    trainer = TRAINERS[name]
    inputs = inputs_of(trainer, layout, dtype)
    o, found = step(functions, trainer, inputs)
    assert dict(fla.calls) == {(trainer.name, "cula"): 1}

    d_o, _ = gradients.upstream(inputs)
    exact, naive = (
        passes.prefill(given, backend=backend).o
        for given, backend in ((inputs.double(), "reference"), (inputs, "reference:naive"))
    )
    assert_accurate("o", o, exact, naive, dtype)
    oracle = gradients.exact(inputs, d_o, None)
    by_token = gradients.backward(inputs, d_o, None, backend="reference:naive")
    assert found.keys() == oracle.keys()
    gradients.assert_near(inputs, found, oracle, by_token)
    assert {name: x.dtype for name, x in found.items()} == {
        name: getattr(inputs, name).dtype for name in found
    }


@pytest.mark.parametrize("name", TRAINERS)
def test_twice_the_same_bits(functions, name):
    """With PyTorch's deterministic algorithms asked for or not, and with any number of threads."""
    trainer, threads = TRAINERS[name], torch.get_num_threads()
    inputs = inputs_of(trainer, "packed", torch.bfloat16)
    first = step(functions, trainer, inputs)
    try:
        torch.use_deterministic_algorithms(True)
        assert_same_bits(first, step(functions, trainer, inputs))
        torch.set_num_threads(1 if threads > 1 else 2)
        assert_same_bits(first, step(functions, trainer, inputs))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert dict(fla.calls) == {(trainer.name, "cula"): 3}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", TRAINERS)
def test_activation_checkpoints(functions, name, reentrant):
    """The backward pass makes the call again; a checkpoint that is not reentrant stops it as soon as it has
    what was saved."""
    trainer = TRAINERS[name]
    inputs = inputs_of(trainer, "batch", torch.bfloat16)
    plain = step(functions, trainer, inputs)
    fla.calls.clear()
    again = step(functions, trainer, inputs, functools.partial(checkpoint, use_reentrant=reentrant))
    assert_same_bits(plain, again)
    assert dict(fla.calls) == {(trainer.name, "cula"): 2 if reentrant else 1}


def test_an_operator_around_the_call(functions):
    """torchtitan has wrapped the call into an operator of its own, whose backward pass makes it again."""

    def operator(call, *leaves):
        class Operator(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                ctx.save_for_backward(*tensors)
                return call(*tensors)

            @staticmethod
            def backward(ctx, d_o):
                again = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                with torch.enable_grad():
                    o = call(*again)
                return torch.autograd.grad(o, again, d_o)

        return Operator.apply(*leaves)

    trainer = TRAINERS["torchtitan KDA"]
    inputs = inputs_of(trainer, "packed", torch.bfloat16)
    plain = step(functions, trainer, inputs)
    assert_same_bits(plain, step(functions, trainer, inputs, operator))
    assert dict(fla.calls) == {("chunk_kda", "cula"): 3}


def test_what_stays_with_fla(functions):
    """Options that no trainer of this list uses, and that this library does not have."""
    trainer = TRAINERS["Megatron KDA"]
    inputs = inputs_of(trainer, "batch", torch.bfloat16)
    wide = inputs.but(k=inputs.k.float())
    assert trainer.call(functions["chunk_kda"], wide, None) == "FLA's own chunk_kda"
    ((name, reason),) = fla.calls
    assert (name, "dtype" in reason) == ("chunk_kda", True)
