# SPDX-License-Identifier: Apache-2.0
"""No argument makes a call ask for memory that a valid call of its tensors would not: it is refused
before."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing import device, level1
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

SMALL = Case("gla", (8,), key_dim=16, value_dim=16, dtype=torch.float32)
ZERO = torch.zeros(1)
FAR = pytest.mark.parametrize("far", [2**31 - 1, 2**62])


@FAR
def test_lengths_beyond_the_tokens(far):
    """The states at the chunk starts of 2^31 tokens would take 2.2 TB. Where the lengths are not read, there
    is one."""
    x, ends = make(SMALL.but(state=False)), torch.tensor([0, far])
    for cu_seqlens in (ends, ends.int()) if far < 2**31 else (ends,):
        if not device.values_are_read():
            assert level1.prefill(x, cu_seqlens=cu_seqlens, return_intermediate_states=True)[2].shape[1] == 1
            continue
        with pytest.raises(ValueError, match=f"cu_seqlens must .*got cu_seqlens.1. = {far}"):
            level1.prefill(x, cu_seqlens=cu_seqlens, return_intermediate_states=True)


@pytest.mark.cpu_only("lengths of a GPU are not read")
def test_the_right_lengths_are_wrong_on_the_host():
    x = make(SMALL.but(state=False))
    with (
        pytest.raises(ValueError, match="cu_seqlens_cpu must have the values of cu_seqlens"),
        torch.inference_mode(),
    ):
        cula.kda.chunk_kda(
            x.q, x.k, x.v, x.g, x.g[..., 0], cu_seqlens=torch.tensor([0, 8]),
            cu_seqlens_cpu=torch.tensor([0, 0]), return_intermediate_states=True,
        )  # fmt: skip


@pytest.mark.parametrize("null_index", [-(2**31), -1, 0, 1, 2, 3, 10**6, 2**31 - 1])
def test_a_null_index_beyond_the_rows(null_index):
    """The final state of three rows once came with as many unused rows as the null index says."""
    x = make(SMALL.but(lengths=(8,) * 3, pool=True))
    slots = torch.tensor([4, 5, 6], dtype=torch.int32)
    x = x.but(initial_state=torch.randn(8, *x.initial_state.shape[1:]), initial_state_indices=slots)
    wanted = level1.prefill(x)
    o, final_state = level1.prefill(x, null_index=null_index)
    assert_same_bits("o", wanted[0], o)
    assert_same_bits("final_state", wanted[1], final_state)
    assert final_state.untyped_storage().nbytes() <= 2 * final_state.nbytes


HUGE = {
    "v": ((2**20, 2**20, 2, 16), r"v must have shape \[B, T, HV, V\]"),
    "q": ((1, 8, 2, 2**40), "(q must have a key dimension|k must have shape)"),
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize(
    "named",
    [
        {"output_final_state": False},
        {"output_final_state": True},
        {"return_intermediate_states": True},
        {"checkpoints": cula.Checkpoints(torch.zeros(1, 2, 16, 16), torch.zeros(0, 3, dtype=torch.int32))},
        {
            "initial_state": torch.zeros(4, 2, 16, 16),
            "initial_state_indices": torch.zeros(1, dtype=torch.int32),
        },
    ],
    ids=lambda named: next(iter(named)),
)
def test_outputs_of_tensors_that_do_not_fit(name, named):
    shape, message = HUGE[name]
    x = make(SMALL.but(state=False))
    with pytest.raises(ValueError, match=message):
        level1.prefill(x.but(**{name: ZERO.expand(shape)}), **named)
    with pytest.raises(ValueError, match=message):
        level1.segment(x.but(**{name: ZERO.expand(shape)}))


@pytest.mark.parametrize("run", [level1.prefill, level1.segment])
def test_more_sequences_than_memory(run):
    x = make(SMALL.but(state=False))
    with pytest.raises(ValueError, match="cu_seqlens must be contiguous"):
        run(x.but(cu_seqlens=torch.zeros(1, dtype=torch.int32).expand(2**40)))


# What [1, T] and [N, T] mean to decode


def test_rows_of_decode_are_along_either_dimension(algorithm):
    x = make(Case(algorithm, (1,) * 4, key_dim=16, value_dim=16))
    turned = x.but(
        **{
            name: tensor.flatten(0, 1)[None]
            for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")
            if (tensor := getattr(x, name)) is not None
        }
    )
    states = x.initial_state.clone(), x.initial_state.clone()
    wanted, found = level1.decode(x, states[0])[0], level1.decode(turned, states[1])[0]
    assert_same_bits("o", wanted, found.transpose(0, 1))
    assert_same_bits("state", *states)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_no_rows_of_any_tokens_are_decoded(algorithm, tokens):
    """[0, T] has no rows; it once became T rows of no token."""
    x = make(Case(algorithm, (tokens, tokens), key_dim=16, value_dim=16))
    names = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")
    none = x.but(**{name: tensor[:0] for name in names if (tensor := getattr(x, name)) is not None})
    before = x.initial_state.clone()
    o, state = level1.decode(none, x.initial_state)
    assert o.shape == (0, *x.o_shape[1:])
    assert_same_bits("state", before, state)


def test_several_tokens_of_several_rows_are_refused_by_decode(algorithm):
    x = make(Case(algorithm, (3, 3), key_dim=16, value_dim=16))
    before = x.initial_state.clone()
    with pytest.raises(
        ValueError, match=r"q must have one token per row.*cula_verify.*state_pool.*got \[2, 3, 2, 16\]"
    ):
        level1.decode(x, x.initial_state)
    assert_same_bits("state", before, x.initial_state)
    slots = torch.arange(2, dtype=torch.int32)
    level1.prefill(x, initial_state=None, state_pool=x.initial_state, initial_state_indices=slots)
    assert not torch.equal(before, x.initial_state)
