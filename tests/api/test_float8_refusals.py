# SPDX-License-Identifier: Apache-2.0
"""What a state of float8_e4m3fn is refused for, by the name of the argument and with nothing written."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits
from cula_testing.float8 import FLOAT8, quantised

CASE = Case("gdn", (1, 1), key_dim=16, value_dim=8)


def given():
    inputs = make(CASE)
    codes, scales = quantised(inputs.initial_state)
    named = {"g": inputs.g, "beta": inputs.beta, "mode": "gdn"}
    return (inputs.q, inputs.k, inputs.v), codes, scales, named


# What is wrong, of the codes and the scales, and the words about it.
REFUSED = {
    "none": (lambda *_: {}, "state_scales must be given with a state of float8_e4m3fn"),
    "dtype": (
        lambda _, scales: {"state_scales": scales.bfloat16()},
        "state_scales must have dtype float32, got bfloat16",
    ),
    "slots": (
        lambda _, scales: {"state_scales": scales[:1]},
        r"state_scales must have shape \[slots, HV, V\] = \[2, 2, 8\], got \[1, 2, 8\]",
    ),
    "one for a tile": (
        lambda _, scales: {"state_scales": scales[..., :1]},
        r"state_scales must have shape \[slots, HV, V\]",
    ),
    "dimensions": (
        lambda _, scales: {"state_scales": scales[..., None]},
        r"state_scales must have shape \[slots, HV, V\]",
    ),
    "expanded": (
        lambda _, scales: {"state_scales": scales[..., :1].expand_as(scales)},
        "state_scales must not overlap itself in memory",
    ),
    "the pool's memory": (
        lambda codes, scales: {
            "state_scales": codes.view(torch.float32).flatten()[: scales.numel()].view(scales.shape)
        },
        "state_scales must share no memory with the states",
    ),
    "another float8": (
        lambda codes, scales: {"state": codes.view(torch.float8_e5m2), "state_scales": scales},
        "must be a tensor of floats, int32, int64 or bool, got Float8_e5m2",
    ),
    "float32 state": (
        lambda codes, scales: {"state": codes.float(), "state_scales": scales},
        "state_scales must be left out without a state of float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_decode_refuses(name):
    change, message = REFUSED[name]
    tokens, codes, scales, named = given()
    named |= {"state": codes, **change(codes, scales)}
    before = codes.view(torch.uint8).clone()
    with pytest.raises(ValueError, match=f"decode: .*{message}"):
        cula.cula_decode(*tokens, **named)
    assert_same_bits("pool", codes.view(torch.uint8), before)


def test_scales_must_be_a_tensor():
    tokens, codes, _, named = given()
    with pytest.raises(TypeError, match="decode: final_scales must be a tensor or None, got float"):
        cula.cula_decode(*tokens, codes, state_scales=1.0, **named)


@pytest.mark.parametrize("grows", ["q", "state_scales"])
def test_gradients_are_refused(grows):
    (q, k, v), codes, scales, named = given()
    del named["mode"]
    (q if grows == "q" else scales).requires_grad_()
    with pytest.raises(NotImplementedError, match=f"prefill: {grows} requires gradients, and a call with a "
                       "state of float8_e4m3fn has none"):  # fmt: skip
        cula.cula_gdn(q, k, v, **named, initial_state=codes, state_scales=scales)
    with pytest.raises(NotImplementedError, match=f"prefill: {grows} requires gradients"):
        cula.cula_gdn(q, k, v, **named, state_pool=codes, state_scales=scales)
    with torch.no_grad():
        cula.cula_gdn(q, k, v, **named, state_pool=codes, state_scales=scales)


def test_states_on_the_way_are_not_float8():
    (q, k, v), codes, scales, named = given()
    del named["mode"]
    plan = torch.tensor([[0, 1, 0]])
    with pytest.raises(
        ValueError, match=r"checkpoints\.states must have dtype float32 or bfloat16 or float16"
    ):
        cula.cula_gdn(
            q, k, v, **named, state_pool=codes, state_scales=scales,
            checkpoints=cula.Checkpoints(codes.clone(), plan),
        )  # fmt: skip
    with pytest.raises(ValueError, match="snapshots must have dtype float32 or bfloat16 or float16"):
        cula.cula_verify(
            q, k, v, codes, mode="gdn", **named, state_scales=scales, snapshots=codes[:, None].clone()
        )


def test_backward_declines_by_a_sentence():
    rows = cula.explain("kda", "backward", state_dtype=FLOAT8)
    assert rows.chosen is None
    assert "a state of float8_e4m3fn has no gradients" in {row.reason for row in rows}


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify"])
def test_explain_knows_the_dtype(pass_name):
    assert cula.explain("kda", pass_name, state_dtype=FLOAT8, tokens=1).chosen
