# SPDX-License-Identifier: Apache-2.0
"""What the short convolution and the gated RMSNorm refuse: the argument is named, and nothing written."""

from __future__ import annotations

import pytest
import torch

from cula import conv, norm
from cula_testing import device

A = torch.randn

# what is wrong: (the arguments of causal_conv1d_fn besides x and weight, what the message says)
PROMPT = {
    "bias of another size": ({"bias": A(7)}, r"bias must have shape \[D\]|bias must have shape \[8\]"),
    "a short state": ({"initial_states": A(2, 8, 2)}, "initial_states? must have shape"),
    "states of other rows": ({"initial_states": A(3, 8, 3)}, "initial_states? must have shape"),
    "numbers of other tokens": (
        {"seq_idx": torch.zeros(2, 4, dtype=torch.int32)},
        r"seq_idx must have shape",
    ),
    "numbers and states": (
        {"seq_idx": torch.zeros(2, 5, dtype=torch.int32), "initial_states": A(2, 8, 3)},
        "seq_idx must be left out with states",
    ),
    "lengths of a batch": ({"query_start_loc": torch.tensor([0, 5])}, "B = 2"),
    "an activation": ({"activation": "gelu"}, "activation must be None, silu or swish"),
    "room for no states": ({"final_states_out": A(2, 8, 3)}, "final_states_out must be left out"),
    "room of another shape": (
        {"final_states_out": A(2, 8, 4), "return_final_states": True},
        "final_states_out must have shape",
    ),
    "slots of no pool": ({"cache_indices": torch.tensor([0, 1])}, "cache_indices must be left out"),
    "a pool and states": (
        {"conv_states": A(4, 8, 3), "initial_states": A(2, 8, 3)},
        "conv_states must be left out",
    ),
    "a pool of other channels": ({"conv_states": A(4, 7, 3)}, "conv_states must have shape"),
    "too few slots": (
        {"conv_states": A(4, 8, 3), "cache_indices": torch.tensor([0])},
        "cache_indices must have shape",
    ),
    "a slot that is not there": (
        {"conv_states": A(4, 8, 3), "cache_indices": torch.tensor([0, 4])},
        "cache_indices must name slots below 4",
    ),
}
KERNELS = {
    "lengths that fall": ([0, 4, 3], "(cu_seqlens|query_start_loc) must not fall"),
    "lengths beyond the end": ([0, 6], "(cu_seqlens|query_start_loc) must end within"),
    "lengths from elsewhere": ([1, 5], "(cu_seqlens|query_start_loc) must begin with 0"),
    "lengths that are floats": (
        [0.0, 5.0],
        "(cu_seqlens|query_start_loc) must have dtype int32 or int64",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("what", PROMPT)
def test_a_prompt(what, dtype):
    given, message = PROMPT[what]
    if what == "a slot that is not there" and not device.values_are_read():
        pytest.skip("values in a GPU's memory are not read")
    given = {
        name: x.to(torch.get_default_device(), dtype if x.is_floating_point() else x.dtype)
        if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }  # fmt: skip
    pool = given.get("conv_states")
    before = None if pool is None else pool.clone()
    with pytest.raises((ValueError, NotImplementedError), match=message):
        conv.causal_conv1d_fn(A(2, 8, 5, dtype=dtype), A(8, 4, dtype=dtype), **given)
    if pool is not None:
        assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        ((2, 8), (8, 4)),
        ((2, 8, 5), (7, 4)),
        ((2, 8, 5), (8, 17)),
        ((2, 8, 5), (8, 0)),
        ((2, 8, 5), (8, 1, 4)),
    ],
)
def test_shapes_of_a_prompt(x, weight):
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=r"(x|weight) must have shape"):
            conv.causal_conv1d_fn(A(x, dtype=dtype), A(weight, dtype=dtype))


@pytest.mark.cpu_only("lengths are read")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and plain PyTorch
@pytest.mark.parametrize("what", KERNELS)
def test_lengths(what, dtype):
    lengths, message = KERNELS[what]
    x, weight, pool = A(8, 5, dtype=dtype), A(8, 4, dtype=dtype), torch.zeros(2, 8, 3, dtype=dtype)
    given = {"query_start_loc": torch.tensor(lengths)}
    with pytest.raises(ValueError, match=message):
        conv.causal_conv1d_fn(x, weight, **given)
    with pytest.raises(ValueError, match=message):
        conv.causal_conv1d_update(x.t(), pool, weight, **given)
    assert not pool.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.bool, torch.float32, torch.int8])
def test_numbers_of_sequences_are_integers(dtype, other):
    with pytest.raises(ValueError, match="seq_idx must "):
        conv.causal_conv1d_fn(
            A(2, 8, 5, dtype=dtype), A(8, 4, dtype=dtype), seq_idx=torch.zeros(2, 5).to(other)
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
@pytest.mark.parametrize("name", ["x", "weight", "bias", "initial_states", "conv_states", "final_states_out"])
def test_numbers_are_floats(name, dtype):
    given = {"x": A(2, 8, 5), "weight": A(8, 4), "bias": A(8)}
    if name in ("initial_states", "conv_states", "final_states_out"):
        given[name] = A(2, 8, 3)
    given[name] = given[name].to(dtype)
    with pytest.raises(ValueError, match=r"must have a floating dtype"):
        conv.causal_conv1d_fn(**given, return_final_states=name == "final_states_out")
    if name in ("x", "weight", "bias"):
        with pytest.raises(ValueError, match=f"{name} must have a floating dtype"):
            conv.causal_conv1d_update(**{n: given[n] for n in ("x", "weight", "bias")}, conv_state=A(2, 8, 3))


@pytest.mark.parametrize(
    "strides", [(0, 3, 1), (24, 1, 0), (24, 2, 1)], ids=["slots", "columns", "channels that meet"]
)
def test_what_is_written_does_not_overlap(strides):
    memory = torch.zeros(96)
    pool = memory.as_strided((2, 8, 3), strides)
    for name, others in (("conv_states", {}), ("final_states_out", {"return_final_states": True})):
        with pytest.raises(ValueError, match=f"{name} must not overlap itself"):
            conv.causal_conv1d_fn(A(2, 8, 5), A(8, 4), **{name: pool}, **others)
    for x, weight in ((A(2, 8, 5), A(8, 4)), (A(2, 8, 5).double(), A(8, 4).double())):
        with pytest.raises(ValueError, match="conv_state must not overlap itself"):
            conv.causal_conv1d_update(x, pool, weight)
    assert not memory.any()


STEP = {
    "a short state": ({"conv_state": A(2, 8, 2)}, "conv_state must have shape"),
    "fewer slots than rows": ({"conv_state": A(1, 8, 4)}, "conv_state must have a slot for each"),
    "slots of other rows": ({"conv_state_indices": torch.tensor([1])}, r"conv_state_indices must have shape"),
    "slots that are floats": (
        {"conv_state_indices": A(2)},
        "conv_state_indices must have dtype int32 or int64",
    ),
    "no room for drafts": (
        {"num_accepted_tokens": torch.tensor([1, 1]), "x": A(2, 8, 3)},
        "conv_state must have W - 2",
    ),
    "a ring with drafts": (
        {"num_accepted_tokens": torch.tensor([1, 1]), "cache_seqlens": torch.tensor([1, 1])},
        "num_accepted_tokens must be left out with cache_seqlens",
    ),
    "tokens without lengths": ({"x": A(2, 8, 1, 1)}, r"x must have shape \[B, D\] or"),
    "packed rows of a batch": ({"query_start_loc": torch.tensor([0, 2])}, r"x must have shape \[tokens, D\]"),
    "a state that repeats itself": (
        {"conv_state": A(2, 8, 1).expand(2, 8, 4)},
        "conv_state must not overlap",
    ),
}
STEP_VALUES = {
    "a slot that is not there": (
        {"conv_state_indices": torch.tensor([0, 9])},
        "conv_state_indices must name slots below 2",
    ),
    "a slot twice": ({"conv_state_indices": torch.tensor([1, 1])}, "name each slot once, got slot 1 twice"),
    "a negative count": ({"cache_seqlens": torch.tensor([3, -1])}, "cache_seqlens must not be negative"),
    "no accepted token": (
        {"num_accepted_tokens": torch.tensor([1, 0])},
        "num_accepted_tokens must be from 1 to 2",
    ),
}


@pytest.mark.cpu_only("the kernel of CPUs reads the indices")
@pytest.mark.parametrize("far", [2**63 - 1, 2**63 - 3, 5, 0, -1])
def test_tokens_accepted_beyond_the_state(far):
    memory = torch.full((3, 8, 6), float("nan"))
    pool = memory[1:2].zero_()
    with pytest.raises(ValueError, match="num_accepted_tokens must be from 1 to 4"):
        conv.causal_conv1d_update(
            torch.zeros(1, 8), pool, torch.ones(8, 4), num_accepted_tokens=torch.tensor([far])
        )
    assert not pool.any()


def test_slots_of_a_pool():
    pool, x, weight = torch.zeros(2, 8, 3), A(2, 8, 3), A(8, 4)
    if device.values_are_read():
        with pytest.raises(ValueError, match="cache_indices must name each slot once"):
            conv.causal_conv1d_fn(x, weight, conv_states=pool, cache_indices=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="cache_indices must have dtype int32 or int64"):
        conv.causal_conv1d_fn(x, weight, conv_states=pool, cache_indices=torch.tensor([0.0, 1.0]))
    assert not pool.any()
    y = conv.causal_conv1d_fn(
        x, weight, conv_states=pool, cache_indices=torch.tensor([0, 99]), pad_slot_id=99
    )
    assert y[0].any()
    assert not y[1].any()
    assert not pool[1].any()
    none = conv.causal_conv1d_fn(A(8, 3), weight, conv_states=pool, query_start_loc=torch.tensor([0]))
    assert not none.any()
    empty = conv.causal_conv1d_fn(x, weight, conv_states=pool[:0], cache_indices=torch.tensor([-1, -1]))
    assert not empty.any()
    for row in conv.causal_conv1d_update(x, pool, weight, pad_slot_id=0)[:1]:
        assert not row.any()


def refused_step(given, message):
    given = {"x": A(2, 8, 1), "conv_state": A(2, 8, 4), "weight": A(8, 4), **given}
    given = {name: x.to(torch.get_default_device()) for name, x in given.items()}
    before = given["conv_state"].clone()
    with pytest.raises(ValueError, match=message):
        conv.causal_conv1d_update(**given)
    assert torch.equal(given["conv_state"], before)


@pytest.mark.parametrize("what", STEP)
def test_the_next_tokens(what):
    refused_step(*STEP[what])


@pytest.mark.cpu_only("values are read")
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("what", STEP_VALUES)
def test_values_of_the_next_tokens(what, plain, monkeypatch):
    if plain:
        monkeypatch.setattr(conv._layers, "takes", lambda *_: False)
    refused_step(*STEP_VALUES[what])


@pytest.mark.parametrize("what", STEP)
def test_the_next_tokens_of_other_devices(what, monkeypatch):
    monkeypatch.setattr(conv._layers, "takes", lambda *_: False)
    refused_step(*STEP[what])


@pytest.mark.cpu_only("the kernel of CPUs looks at memory")
def test_memory_that_is_shared_is_refused():
    state = A(2, 8, 4)
    with pytest.raises(ValueError, match="conv_state must share no memory with x"):
        conv.causal_conv1d_update(state[..., 0], state, A(8, 4))


NORM = {
    "a gate of another shape": ({"g": A(3, 9)}, "g must have x's shape"),
    "a weight of another size": ({"weight": A(7)}, r"weight must have shape \[8\]"),
    "a bias of another size": ({"bias": A(9)}, r"bias must have shape \[8\]"),
    "a residual of another shape": ({"residual": A(2, 8)}, "residual must have x's shape"),
    "groups that do not divide": ({"group_size": 3}, "group_size must divide the 8 channels, got 3"),
    "no channels": ({"x": A(3, 0), "g": None, "weight": None}, r"x must have shape \[.., N\]"),
    "no dimension": ({"x": A(()), "g": None, "weight": None}, r"x must have shape \[.., N\]"),
    "x of integers": ({"x": torch.ones(3, 8).int()}, "x must have a floating dtype, got torch.int32"),
    "an epsilon": ({"eps": float("nan")}, "eps must not be negative, got nan"),
    "an activation": ({"activation": "relu"}, "activation must be swish, silu or sigmoid, got 'relu'"),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("what", NORM)
def test_a_norm(what, plain, monkeypatch):
    if plain:
        monkeypatch.setattr(norm._layers, "takes", lambda *_: False)
    given, message = NORM[what]
    with pytest.raises(ValueError, match=message):
        norm.rms_norm_gated(**{"x": A(3, 8), "g": A(3, 8), "weight": A(8), **given})
    with pytest.raises(TypeError, match="group_size must be of type int, got float"):
        norm.rms_norm_gated(A(3, 8), None, None, group_size=2.0)
