# SPDX-License-Identifier: Apache-2.0
"""More value channels than a kernel takes: the bits of calls for 256 at a time, whatever else is asked
for."""

from __future__ import annotations

import pytest
import torch

from cula_testing import gradients, passes
from cula_testing.cases import DELTA, ERASE, Case, Inputs, make, strided
from cula_testing.compare import assert_same_bits
from cula_testing.kinds import KINDS, Call, ready

STATES = ("initial_state", "final_state", "checkpoints", "chunk_states", "snapshots", "b")


def value_channels(call: Call, first: int, count: int) -> Call:
    """The call for some of its value channels, on copies of what it touches."""

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in ("v", "o") or (name == "beta" and tensor.ndim == 4):
            tensor = tensor.narrow(-1, first, count)
        if name in STATES:
            tensor = tensor.narrow(-2, first, count)
        return tensor.clone()

    taken = {name: take(name, tensor) for name, tensor in call.tensors.items()}
    tensors = {name: tensor for name, tensor in taken.items() if hasattr(call.inputs, name)}
    inputs = call.inputs.but(case=call.inputs.case.but(value_dim=count), **tensors)
    return Call(call.kind, inputs, {name: taken.get(name, value) for name, value in call.named.items()})


@pytest.mark.parametrize(("value_dim", "beta_per_value"), [(300, False), (513, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_many_values_are_calls_for_256_at_a_time(algorithm, kind, value_dim, beta_per_value):
    able = algorithm in DELTA if kind != "segment" else algorithm in ERASE
    beta_per_value = beta_per_value and able
    call = ready(kind, algorithm, value_dim=value_dim, beta_per_value=beta_per_value)
    parts = [value_channels(call, first, min(256, value_dim - first)) for first in range(0, value_dim, 256)]
    for each in (call, *parts):
        each()
    for name, tensor in call.results().items():
        found = [part.results()[name] for part in parts]
        if name == "m":
            assert_same_bits(name, tensor, found[0])
        else:
            assert_same_bits(name, tensor, torch.cat(found, dim=-1 if name == "o" else -2))


def test_many_values_keep_the_rule(algorithm):
    """As a retention layer of FLA's has them."""
    case = Case(algorithm, (130, 0, 65), packed=True, heads=1, value_heads=1, key_dim=256, value_dim=512)
    passes.assert_rule(lambda inputs, backend: passes.prefill(inputs, backend=backend), make(case))


# Gradients: the operator takes 256 value channels, and autograd calls it for as many at a time.

OF_VALUES = {"v": 3, "initial_state": 2}


def parts_as_heads(inputs: Inputs, d_o, d_final_state) -> tuple[Inputs, tuple[torch.Tensor, torch.Tensor]]:
    """The same problem with a value head for each 256 value channels of a head, the last ones padded with
    zeros. Value channels do not interact."""
    count = -(-inputs.v.shape[3] // 256)

    def heads(x: torch.Tensor | None, dim: int, head: int) -> torch.Tensor | None:
        """Value channels are dimension `dim`, value heads `head`."""
        if x is None:
            return None
        padded = x.new_zeros((*x.shape[:dim], 256 * count, *x.shape[dim + 1 :]))
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        return padded.unflatten(dim, (count, 256)).movedim(dim, head + 1).flatten(head, head + 1)

    def repeated(x: torch.Tensor | None, head: int) -> torch.Tensor | None:
        return None if x is None else x.repeat_interleave(count, head)

    beta = inputs.beta
    case = inputs.case.but(value_heads=count * inputs.case.value_heads, value_dim=256)
    split = inputs.but(
        case=case,
        v=heads(inputs.v, 3, 2),
        initial_state=heads(inputs.initial_state, 2, 1),
        g=repeated(inputs.g, 2),
        erase=repeated(inputs.erase, 2),
        a_key=repeated(inputs.a_key, 2),
        b_key=repeated(inputs.b_key, 2),
        beta=heads(beta, 3, 2) if beta is not None and beta.ndim == 4 else repeated(beta, 2),
        **{name: repeated(getattr(inputs, name), 0) for name in ("A_log", "dt_bias", "decay")},
    )
    return split, (heads(d_o, 3, 2), heads(d_final_state, 2, 1))


def heads_joined(inputs: Inputs, found: gradients.Gradients) -> gradients.Gradients:
    """The gradients of the problem, from those of its parts as heads, in the precision of those."""
    count, value_dim = -(-inputs.v.shape[3] // 256), inputs.v.shape[3]
    joined = {}
    for name, x in found.items():
        like = getattr(inputs, name)
        head = {"initial_state": 1, "A_log": 0, "dt_bias": 0}.get(name, 2)
        if name in ("q", "k"):
            joined[name] = x
        elif name in OF_VALUES or (name == "beta" and like.ndim == 4):
            dim = OF_VALUES.get(name, 3)
            parts = x.unflatten(head, (-1, count)).movedim(head + 1, dim).flatten(dim, dim + 1)
            joined[name] = parts.narrow(dim, 0, value_dim)
        else:
            joined[name] = x.double().unflatten(head, (-1, count)).sum(head + 1).to(x.dtype)
    return joined


@pytest.mark.parametrize("value_dim", [320, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_keep_the_rule(algorithm, dtype, value_dim):
    """Of a call with grouped heads, packed tokens, a raw gate where there is one, and a state."""
    gated = algorithm in ("kda", "gdn", "gdn2")
    case = Case(
        algorithm, (70, 0, 33), packed=True, tail=3, heads=1, value_heads=2, key_dim=48, value_dim=value_dim,
        dtype=dtype, gate="softplus" if gated else "log_decay", beta_is_logit=gated, qk_l2norm=gated,
    )  # fmt: skip
    if (
        algorithm in ERASE
    ):  # of the other seed the largest gradient is a sixth of each of the two it is made of
        case = case.but(seed=1)
    assert_gradients(make(case))


@pytest.mark.parametrize("algorithm", DELTA)
def test_gradients_of_a_write_strength_per_value_channel(algorithm):
    assert_gradients(make(Case(algorithm, (40,), heads=1, value_heads=1, value_dim=300, beta_per_value=True)))


def assert_gradients(inputs: Inputs) -> None:
    outer = gradients.upstream(inputs)
    found = gradients.through_autograd(inputs, *outer)
    split, of_split = parts_as_heads(inputs, *outer)
    oracle = heads_joined(inputs.double(), gradients.exact(split, *of_split))
    naive = heads_joined(inputs, gradients.backward(split, *of_split, backend="reference:naive"))
    for name, gradient in found.items():
        assert (gradient.dtype, gradient.shape) == (getattr(inputs, name).dtype, oracle[name].shape), name
    gradients.assert_near(inputs, found, oracle, naive)


def test_gradients_of_values_are_those_of_256_at_a_time(algorithm):
    """In their bits: also with K-first states, rows of strides, and where o or the state has no gradient."""
    case = Case(algorithm, (70, 20), packed=True, value_heads=4, value_dim=320, k_first=True, fused=True)
    inputs = make(case)
    d_o, d_final_state = gradients.upstream(inputs)
    outer = strided(d_o), d_final_state
    for given in (outer, (d_o[:, :1, :1].expand_as(d_o), None), (None, d_final_state)):
        found = gradients.through_autograd(inputs, *given)
        for first, count in ((0, 256), (256, 64)):
            part = inputs.but(
                case=case.but(value_dim=count),
                v=inputs.v.narrow(3, first, count),
                initial_state=inputs.initial_state.narrow(2, first, count),
            )
            of_part = (
                x if x is None else x.narrow(dim, first, count) for x, dim in zip(given, (3, 2), strict=True)
            )
            wanted = gradients.backward(part, *of_part, wanted=OF_VALUES)
            for name, dim in OF_VALUES.items():
                assert_same_bits(f"d_{name}", wanted[name], found[name].narrow(dim, first, count))


def test_gradients_of_values_in_both_layouts_of_states(algorithm):
    inputs = make(Case(algorithm, (70,), value_dim=320))
    d_o, d_final_state = gradients.upstream(inputs)
    wanted = gradients.through_autograd(inputs, d_o, d_final_state)
    state = inputs.initial_state.mT.contiguous()
    turned = gradients.through_autograd(
        inputs.but(initial_state=state), d_o, d_final_state.mT.contiguous(), state_v_first=False
    )
    turned["initial_state"] = turned["initial_state"].mT
    for name, gradient in wanted.items():
        assert_same_bits(f"d_{name}", gradient, turned[name])
