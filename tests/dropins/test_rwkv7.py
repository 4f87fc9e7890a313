# SPDX-License-Identifier: Apache-2.0
"""FLA's functions of RWKV-7 and of diagonal plus low-rank transitions are the ops of `rwkv7`, and refuse what
FLA refuses."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import pytest
import torch

import cula
from cula import generalized_delta_rule, rwkv7
from cula_testing import gradients, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits, errors


def of_dplr(x: Inputs) -> tuple[torch.Tensor, ...]:
    return x.q, x.k, x.v, x.a_key, x.b_key, x.g


def of_rwkv7(x: Inputs) -> tuple[torch.Tensor, ...]:
    return x.q, x.g, x.k, x.v, x.a_key, x.b_key


# (function, its arguments, its scale if left out)
FUNCTIONS = [
    (rwkv7.chunk_rwkv7, of_rwkv7, 1.0),
    (rwkv7.fused_recurrent_rwkv7, of_rwkv7, None),
    (generalized_delta_rule.chunk_dplr_delta_rule, of_dplr, None),
    (generalized_delta_rule.fused_recurrent_dplr_delta_rule, of_dplr, None),
]


OF_STATES = "initial_state=None, output_final_state=False"
OF_CHUNKS = (
    "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, "
    "cp_context=None, lower_bound=None"
)
SIGNATURES = {
    rwkv7.chunk_rwkv7: f"r, w, k, v, a, b, scale=1.0, {OF_STATES}, {OF_CHUNKS}",
    rwkv7.fused_recurrent_rwkv7: "r, w, k, v, a, b, scale=None, initial_state=None, "
    "output_final_state=True, cu_seqlens=None",
    rwkv7.fused_mul_recurrent_rwkv7: f"r, w, k, v, kk, a, scale=1.0, {OF_STATES}, reverse=False, "
    "cu_seqlens=None",
    generalized_delta_rule.chunk_dplr_delta_rule: f"q, k, v, a, b, gk, scale=None, {OF_STATES}, {OF_CHUNKS}, "
    "**kwargs",
    generalized_delta_rule.fused_recurrent_dplr_delta_rule: f"q, k, v, a, b, gk, scale=None, {OF_STATES}, "
    "reverse=False, cu_seqlens=None",
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signature(function):
    """FLA's."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare))[1:-1] == SIGNATURES[function]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("state", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize(("function", "arguments", "scale"), FUNCTIONS)
def test_functions(function, arguments, scale, packed, state):
    lengths = (70, 0, 9) if packed else (70, 70)
    inputs = make(Case("rwkv7", lengths, packed=packed, state=state, key_dim=64, value_dim=32, scale=scale))
    run = passes.decode if "recurrent" in function.__name__ else passes.prefill
    wanted = run(inputs)
    named = {"cu_seqlens": inputs.cu_seqlens}
    named["initial_state"] = inputs.initial_state.mT.contiguous() if state else None
    o, final_state = function(*arguments(inputs), output_final_state=True, **named)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state.mT, final_state)
    scaled = run(inputs.but(case=inputs.case.but(scale=0.1)))
    o, nothing = function(*arguments(inputs), output_final_state=False, scale=0.1, **named)
    assert nothing is None
    assert_same_bits("o", scaled.o, o)


@pytest.mark.parametrize(("function", "arguments", "scale"), FUNCTIONS)
def test_gradients(function, arguments, scale):
    inputs = make(Case("rwkv7", (70, 0, 9), packed=True, scale=scale))
    names = ("q", "k", "v", "g", "a_key", "b_key", "initial_state")
    leaves = {each: getattr(inputs, each).clone().requires_grad_() for each in names}
    o, final_state = function(
        *arguments(inputs.but(**leaves)), initial_state=leaves["initial_state"].mT, output_final_state=True,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    d_o, d_final = gradients.upstream(inputs)
    found = torch.autograd.grad((o, final_state), list(leaves.values()), (d_o, d_final.mT))
    wanted = gradients.backward(inputs, d_o, d_final)
    for each, gradient in zip(names, found, strict=True):
        assert_same_bits(f"d_{each}", wanted[each].to(gradient.dtype), gradient)


def test_the_recurrent_function_of_what_a_layer_has():
    inputs = make(Case("rwkv7", (20, 20), state=False))
    r, w, k, v, a, _ = of_rwkv7(inputs)
    kk, share = -a, torch.rand(a.shape).to(a)
    o, state = rwkv7.fused_mul_recurrent_rwkv7(r, w, k, v, kk, share, output_final_state=True)
    wanted = rwkv7.fused_recurrent_rwkv7(r, w, k, v, a, kk.float() * share, scale=1.0)
    assert_same_bits("o", wanted[0], o)
    assert_same_bits("state", wanted[1], state)


def test_kda_is_one_of_them():
    """The key of KDA reads what has decayed, and writes what it is short of."""
    x = make(Case("kda", (130, 130), dtype=torch.float32))
    beta = x.beta[..., None]
    named = {"initial_state": x.initial_state, "output_final_state": True}
    wanted = cula.cula_kda(x.q, x.k, x.v, x.g, x.beta, **named)
    found = cula.cula_rwkv7(x.q, x.k, beta * x.v, g=x.g, a_key=-x.g.exp() * x.k, b_key=beta * x.k, **named)
    for one, other in zip(found, wanted, strict=True):
        assert errors(one, other.double()).rms < 1e-5


# FLA's refusals, in FLA's words.

SMALL = make(Case("rwkv7", (4,), key_dim=16, value_dim=16, state=False))
RWKV7 = dict(zip("rwkvab", of_rwkv7(SMALL), strict=True))
DPLR = dict(zip(("q", "k", "v", "a", "b", "gk"), of_dplr(SMALL), strict=True))
H0 = torch.zeros(1, 2, 16, 16)
TWO = {"cu_seqlens": torch.tensor([0, 2, 4])}
CONTEXT = SimpleNamespace(group=None, **TWO)
CHUNK, RECURRENT = rwkv7.chunk_rwkv7, generalized_delta_rule.fused_recurrent_dplr_delta_rule
CHUNK_DPLR = generalized_delta_rule.chunk_dplr_delta_rule

REFUSALS = [
    (CHUNK, RWKV7, {"a": None}, TypeError, "chunk_rwkv7: a must be a tensor, got NoneType"),
    (CHUNK, RWKV7, {"w": SMALL.g[..., 0]}, AssertionError,
     "w must have r's shape, [1, 4, 2, 16], got [1, 4, 2]"),
    (CHUNK, RWKV7, {"b": SMALL.k.long()}, AssertionError, "b must have a floating dtype"),
    (CHUNK, RWKV7, {"v": SMALL.v[:, :, :1]}, AssertionError, "v must have shape"),
    (CHUNK, RWKV7, {"r": SMALL.q[0]}, AssertionError, "r must have shape"),
    (CHUNK, RWKV7, {"lower_bound": 0.0}, ValueError,
     "`lower_bound` must be negative (w is a log-decay < 0), got 0.0."),
    (CHUNK, RWKV7, {"chunk_size": 16.0}, TypeError, "chunk_size must be of type int"),
    (CHUNK, RWKV7, {"safe_gate": 1}, TypeError, "safe_gate must be of type bool"),
    (CHUNK, RWKV7, {"r": torch.zeros(2, 4, 2, 16), **TWO}, ValueError, "expected to be 1 rather than 2"),
    (CHUNK, RWKV7, {"initial_state": H0, **TWO}, ValueError, "2 rather than 1"),
    (CHUNK, RWKV7, {"cp_context": CONTEXT, "initial_state": H0}, AssertionError,
     "Initial state is not supported for CP"),
    (CHUNK, RWKV7, {"cp_context": CONTEXT}, ValueError,
     "chunk_rwkv7: cp_context must have group, got SimpleNamespace"),
    (CHUNK, RWKV7, {"head_first": True}, TypeError, "unexpected keyword argument 'head_first'"),
    (CHUNK_DPLR, DPLR, {"gk": SMALL.g[..., :8]}, AssertionError, "gk must have q's shape"),
    (CHUNK_DPLR, DPLR, {"head_first": True}, DeprecationWarning, "head_first has been removed."),
    (CHUNK_DPLR, DPLR, {"chunksize": 16}, TypeError, "unexpected keyword argument 'chunksize'"),
    (RECURRENT, DPLR, {"reverse": True}, NotImplementedError, "reverse"),
    (rwkv7.fused_mul_recurrent_rwkv7, {**{name: RWKV7[name] for name in "rwkva"}, "kk": SMALL.k},
     {"reverse": True}, NotImplementedError, "reverse"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "base", "wrong", "error", "words"), REFUSALS)
def test_refusal(function, base, wrong, error, words):
    with pytest.raises(error, match=re.escape(words)):
        function(**{**base, **wrong})
