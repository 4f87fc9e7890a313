# SPDX-License-Identifier: Apache-2.0
"""No derivative is lost silently: one that is not built is refused, and every write is counted. What the
gradients are is in tests/laws/test_backward.py."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from cula import _ops
from cula_testing import gradients, level1, passes
from cula_testing.arguments import BASE, arguments
from cula_testing.cases import Case, make, state_like
from cula_testing.compare import assert_same_bits

SMALL = Case("kda", (4,), key_dim=16, value_dim=16, dtype=torch.float32)
PASSES = ("prefill", "decode", "verify", "segment", "backward")
PACKETS = {name: getattr(torch.ops.cula, name) for name in PASSES}
OVERLOADS = [(name, overload) for name, packet in PACKETS.items() for overload in packet.overloads()]
WRITTEN = (
    "o", "final_state", "checkpoints", "chunk_states", "snapshots", "m", "b",
    *(f"d_{name}" for name in _ops.GRADIENTS),
)  # fmt: skip


def a_call(pass_name: str, overload: str) -> tuple[torch._ops.OpOverload, dict]:
    """A valid call of an overload with every tensor that it may write, by name."""
    if pass_name == "backward":
        return a_backward(overload)
    named = arguments(pass_name, BASE.but(dtype=torch.float32, gate="softplus"))
    if pass_name == "verify":
        named["snapshots"] = state_like(BASE, 16, fill=0.0).unflatten(0, (2, 8))
    if pass_name == "prefill":
        named["checkpoints"] = state_like(BASE, 2, fill=0.0)
        named["checkpoint_plan"] = torch.tensor([[0, 8, 0], [1, 8, 1]], dtype=torch.int32)
        named["chunk_states"] = state_like(BASE, 2, fill=0.0).unflatten(0, (2, 1))
    op = getattr(PACKETS[pass_name], overload)
    accepted = {argument.name for argument in op._schema.arguments}
    makes_maps = pass_name == "segment" and overload == "default"
    if "options" in accepted:
        named["options"] = _ops.pack("kda", gate="softplus", make_m=makes_maps, make_b=makes_maps)
    return op, {name: value for name, value in named.items() if name in accepted}


def a_backward(overload: str) -> tuple[torch._ops.OpOverload, dict]:
    inputs = make(SMALL.but(gate="softplus"))
    d_o, d_final_state = gradients.upstream(inputs)
    names = gradients.names(inputs)
    named = {name: value for name, value in inputs.tensors().items() if value is not None}
    named |= {"initial_state": inputs.initial_state, "d_o": d_o, "d_final_state": d_final_state}
    named["options"] = _ops.pack("kda", gate="softplus")
    if overload == "out":
        named |= {f"d_{name}": gradients.empty(inputs, name).zero_() for name in names}
    else:
        named["options"] += sum(_ops.bit("gradients") << _ops.GRADIENTS.index(name) for name in names)
    return getattr(PACKETS["backward"], overload), named


def floats(named: dict) -> list[str]:
    return [
        name for name, value in named.items() if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


@pytest.mark.parametrize(("pass_name", "overload"), OVERLOADS)
def test_operators_have_gradients_or_refuse_them(pass_name, overload):
    op, named = a_call(pass_name, overload)
    for name in floats(named):
        asked = {**named, name: named[name].detach().clone().requires_grad_()}
        before = {each: asked[each].detach().clone() for each in WRITTEN if asked.get(each) is not None}
        if overload == "default" and pass_name in ("prefill", "decode") and name != "decay":
            assert op(**asked)[0].requires_grad
            continue
        with pytest.raises(NotImplementedError, match=rf"{pass_name}: {name} requires gradients"):
            op(**asked)
        for each, was in before.items():
            assert_same_bits(each, was, asked[each].detach())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                op(**asked)


@pytest.mark.parametrize(("pass_name", "overload"), OVERLOADS)
def test_operators_refuse_tangents(pass_name, overload):
    op, named = a_call(pass_name, overload)
    for name in floats(named):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(named[name], torch.ones_like(named[name]))
            with pytest.raises(NotImplementedError, match=rf"{pass_name}: {name} has a tangent"):
                op(**{**named, name: dual})
            with (
                torch.no_grad(),
                pytest.raises(NotImplementedError, match=rf"{pass_name}: {name} has a tangent"),
            ):
                op(**{**named, name: dual})
            op(**{**named, name: dual.detach()})


def test_compose_refuses_derivatives():
    named = {
        "m": torch.randn(3, 1, 2, 8, 8),
        "b": torch.randn(3, 1, 2, 4, 8),
        "state": torch.zeros(1, 2, 4, 8),
    }
    for name, value in named.items():
        with pytest.raises(NotImplementedError, match=f"compose: {name} requires gradients"):
            torch.ops.cula.compose(**{**named, name: value.clone().requires_grad_()})
    torch.ops.cula.compose(**named)
    assert named["state"]._version == 1


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta", "initial_state"])
def test_functions_refuse_tangents(argument):
    inputs = make(SMALL)
    tensor = getattr(inputs, argument)

    def run(value):
        return level1.prefill(inputs.but(**{argument: value}))[0]

    refused = pytest.raises(NotImplementedError, match=f"prefill: {argument} has a tangent")
    with refused:
        torch.func.jvp(run, (tensor,), (torch.ones_like(tensor),))
    with refused:
        torch.func.jacfwd(run)(tensor)
    with refused, forward_ad.dual_level():
        run(forward_ad.make_dual(tensor, torch.ones_like(tensor)))
    with pytest.raises(NotImplementedError, match=f"{argument} requires gradients within torch.func"):
        torch.func.grad(lambda value: run(value).sum())(tensor)


def test_a_primal_beside_a_tangent_runs():
    """Within a level of forward-mode derivatives, only what has a tangent is refused."""
    inputs = make(SMALL)
    wanted = level1.prefill(inputs)[0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs.q, torch.ones_like(inputs.q))
        assert_same_bits("o", wanted, level1.prefill(inputs.but(q=dual.detach()))[0])


# The count of writes


@pytest.mark.parametrize(("pass_name", "overload"), OVERLOADS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_operators_count_their_writes(pass_name, overload, mode):
    op, named = a_call(pass_name, overload)
    before = {name: value._version for name, value in named.items() if isinstance(value, torch.Tensor)}
    with mode():
        op(**named)
    written = {name for name, version in before.items() if named[name]._version > version}
    assert written == {name for name in WRITTEN if name in before}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_functions_count_their_writes(mode):
    inputs = make(SMALL.but(lengths=(1,)))
    out, state = passes.empty_o(inputs), inputs.initial_state
    versions = out._version, state._version
    with mode():
        level1.decode(inputs, state, out=out)
    assert (out._version, state._version) == (versions[0] + 1, versions[1] + 1)
    with mode():
        level1.prefill(inputs, initial_state=None, state_pool=state, out=out)
        level1.prefill(inputs, out=out)
    assert (out._version, state._version) == (versions[0] + 3, versions[1] + 2)
    assert inputs.q._version == inputs.k._version == inputs.v._version == 0


@pytest.mark.parametrize("written", ["out", "state"])
def test_a_saved_tensor_is_not_read_with_new_values(written):
    inputs = make(SMALL.but(lengths=(1,)))
    out, state = passes.empty_o(inputs).zero_(), inputs.initial_state
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * {"out": out, "state": state}[written]).sum()
    with torch.no_grad():
        level1.decode(inputs, state, out=out)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_are_taken_anywhere():
    inputs = make(SMALL.but(lengths=(1,)))
    state = inputs.initial_state.clone()
    wanted, _ = level1.decode(inputs, state)
    with torch.inference_mode():
        uncounted = inputs.map(torch.clone)
        within = uncounted.initial_state.clone()
        assert_same_bits("o", wanted, level1.decode(uncounted, within)[0])
        assert_same_bits("state", state, within)
    for mode in (torch.enable_grad, torch.no_grad):
        pool, out = uncounted.initial_state, torch.empty_like(wanted)
        with torch.inference_mode():
            pool = pool.clone()
        with mode():
            level1.decode(uncounted, pool, out=out)
        assert_same_bits("o", wanted, out)
        assert_same_bits("state", state, pool)
