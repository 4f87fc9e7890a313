# SPDX-License-Identifier: Apache-2.0
"""What a backward call refuses: by name, and before anything is written."""

from __future__ import annotations

import pytest
import torch

from cula import _ops
from cula_testing import gradients, operators
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits, errors

CASE = Case("kda", (7, 12), packed=True, key_dim=16, value_dim=32, value_heads=4, gate="softplus")


def a_call(case: Case = CASE) -> dict:
    inputs = make(case)
    d_o, d_final_state = gradients.upstream(inputs)
    named = {**inputs.tensors(), **case.options, "initial_state": inputs.initial_state}
    named |= {"d_o": d_o, "d_final_state": d_final_state}
    return named | {f"d_{name}": gradients.empty(inputs, name) for name in gradients.names(inputs)}


def refused(named: dict, words: str) -> None:
    written = [name for name in named if name.startswith("d_") and name not in ("d_o", "d_final_state")]
    before = {name: named[name].clone() for name in written if isinstance(named[name], torch.Tensor)}
    with pytest.raises((ValueError, RuntimeError, TypeError), match=words):
        operators.call("backward", **named)
    for name, was in before.items():
        assert_same_bits(name, was, named[name])


def test_a_valid_call_writes_everything():
    named = a_call()
    operators.call("backward", **named)
    for name, value in named.items():
        if name.startswith("d_"):
            assert value.isfinite().all(), name


SHAPES = {
    "d_o": (1, 19, 4, 31), "d_final_state": (3, 4, 32, 16), "d_q": (1, 19, 4, 16), "d_k": (1, 19, 2, 17),
    "d_v": (1, 20, 4, 32), "d_g": (1, 19, 4), "d_beta": (1, 19, 4, 1), "d_A_log": (5,), "d_dt_bias": (4, 15),
    "d_initial_state": (2, 4, 16, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    named = a_call()
    named[name] = torch.zeros(SHAPES[name], dtype=named[name].dtype)
    refused(named, f"backward: {name} must")


# Of a bfloat16 call with float32 gates.
DTYPES = {
    **dict.fromkeys(("d_o", "d_q", "d_k", "d_v"), "bfloat16 or float32, got float64"),
    **dict.fromkeys(("d_g", "d_beta", "d_A_log", "d_dt_bias"), "float32, got float64"),
    "d_initial_state": "float32 or bfloat16 or float16, got float64",
    "d_final_state": "float32 or bfloat16 or float16, got int32",
}


@pytest.mark.parametrize("name", SHAPES)
def test_dtypes(name):
    named = a_call()
    named[name] = named[name].to(torch.int32 if name == "d_final_state" else torch.float64)
    refused(named, f"backward: {name} must have dtype {DTYPES[name]}$")


def test_gradients_may_be_float32():
    named = a_call()
    wide = {name: named[name].float() for name in ("d_o", "d_q", "d_k", "d_v")}
    operators.call("backward", **{**named, **wide})
    operators.call("backward", **named)
    for name in ("d_q", "d_k", "d_v"):
        assert errors(wide[name], named[name].double()).rms <= 1e-2, name


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("d_o", "d_final_state")])
def test_gradients_that_overlap_themselves(name):
    named = a_call()
    dim = 0 if name in ("d_A_log", "d_dt_bias", "d_initial_state") else 1
    named[name] = named[name].narrow(dim, 0, 1).expand(named[name].shape)
    refused(named, f"backward: {name} must not overlap itself")


@pytest.mark.parametrize("name", ["d_q", "d_k", "d_v", "d_g"])
def test_rows_of_gradients_are_contiguous(name):
    named = a_call()
    named[name] = named[name].mT.contiguous().mT
    refused(named, f"backward: {name} must be contiguous in its last dimension")


@pytest.mark.parametrize(
    ("name", "other"),
    [("d_q", "q"), ("d_k", "k"), ("d_v", "d_o"), ("d_g", "g"), ("d_initial_state", "initial_state"),
     ("d_initial_state", "d_final_state"), ("d_k", "d_q"), ("d_beta", "beta"), ("d_A_log", "A_log")],
)  # fmt: skip
def test_gradients_share_no_memory(name, other):
    named = a_call(CASE.but(dtype=torch.float32, dt_bias=False))
    named[name] = named[other]
    refused(named, f"backward: {name} must share no memory with {other}")


def test_a_gradient_may_lie_between_others():
    """Slices of one projection's gradient, as of one projection."""
    named = a_call()
    room = torch.full((1, 19, 2, 40), float("nan"), dtype=torch.bfloat16)
    whole = {**named, "d_q": room[..., :16], "d_k": room[..., 20:36]}
    operators.call("backward", **named)
    operators.call("backward", **whole)
    assert_same_bits("d_q", named["d_q"], whole["d_q"].contiguous())
    assert_same_bits("d_k", named["d_k"], whole["d_k"].contiguous())
    assert room[..., 16:20].isnan().all()
    assert room[..., 36:].isnan().all()


@pytest.mark.parametrize(
    ("name", "without", "algorithm"),
    [("d_g", "g", "lightning"), ("d_beta", "beta", "gla"), ("d_A_log", "A_log", "gla"),
     ("d_dt_bias", "dt_bias", "gla")],
)  # fmt: skip
def test_gradients_of_what_is_not_given(name, without, algorithm):
    named = a_call(CASE.but(algorithm=algorithm, gate="log_decay"))
    named[name] = torch.zeros(1, 19, 4)
    refused(named, f"backward: {name} must be left out without {without}")


def test_a_gradient_of_no_initial_state():
    named = a_call()
    named["initial_state"] = None
    refused(named, "backward: initial_state must be given with d_initial_state")


def test_the_default_overload_asks_for_no_gradient_of_what_is_not_given():
    inputs = make(CASE.but(algorithm="lightning", gate="log_decay"))
    named = {name: value for name, value in inputs.tensors().items() if value is not None}
    options = _ops.pack("lightning") + (_ops.bit("gradients") << _ops.GRADIENTS.index("beta"))
    with pytest.raises(ValueError, match="backward: options must ask for no gradient of what is not given"):
        torch.ops.cula.backward(**named, options=options)


def test_other_passes_take_no_gradients():
    inputs = make(CASE)
    named = {name: value for name, value in inputs.tensors().items() if value is not None}
    options = _ops.pack("kda", gate="softplus") + _ops.bit("gradients")
    with pytest.raises(ValueError, match="prefill: options must have only bits that prefill takes"):
        torch.ops.cula.prefill(**named, options=options)


def test_more_value_channels_than_a_call_takes():
    named = a_call(CASE.but(value_dim=300))
    refused(named, "backward: no backend takes this call")


@pytest.mark.parametrize("lengths", [(0, 0), ()], ids=["no tokens", "no sequences"])
def test_no_tokens(lengths):
    named = a_call(CASE.but(lengths=lengths))
    operators.call("backward", **named)
    assert_same_bits("d_initial_state", named["d_initial_state"], named["d_final_state"])
    assert not named["d_A_log"].any()
    assert not named["d_dt_bias"].any()
