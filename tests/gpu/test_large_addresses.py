# SPDX-License-Identifier: Apache-2.0
"""Tensors of more than 2^31 elements, and elements further apart than that."""

from __future__ import annotations

import pytest
import torch

from cula_testing import passes
from cula_testing.arena import Arena
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits, assert_same_chain
from cula_testing.kinds import KINDS, Call, ready

FAR = 2**31 + 2**20  # elements
NARROW = {
    "heads": 1,
    "value_heads": 1,
    "dtype": torch.bfloat16,
    "gate_dtype": torch.bfloat16,
    "state_dtype": torch.bfloat16,
}
TOKENS = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key", "o")
pytestmark = pytest.mark.large


@pytest.mark.parametrize(("name", "lengths"), [("prefill", (70, 70)), ("decode", (1, 1)), ("verify", (4, 4))])
def test_rows_far_apart(algorithm, name, lengths):
    check_far_apart(ready(name, algorithm, lengths=lengths, **NARROW), 0, FAR)


def test_states_on_the_way_far_apart(algorithm):
    check_far_apart(ready("states on the way", algorithm, lengths=(70, 70), **NARROW), 0, FAR)


def test_maps_far_apart(algorithm):
    check_far_apart(ready("segment", algorithm, packed=False, lengths=(70, 70), **NARROW), 0, FAR)


@pytest.mark.parametrize("name", ["prefill", "recurrent"])
def test_tokens_far_apart(algorithm, name):
    check_far_apart(ready(name, algorithm, packed=False, lengths=(70,), **NARROW), 1, FAR // 64)


def check_far_apart(near: Call, dim: int, stride: int) -> None:
    """Everything that a batch or its tokens index, strewn over memory; states always by sequence."""
    large = {name: x for name, x in near.tensors.items() if x.ndim > 2 and x.is_floating_point()}
    apart = {name: (dim, stride) if name in TOKENS else (0, FAR) for name in large}
    ends = [(x.shape[apart[name][0]] - 1) * apart[name][1] * x.element_size() for name, x in large.items()]
    arena = Arena(max(ends) + (64 << 20))
    far = {
        name: arena.place(x, *apart[name]) if name in large else x.clone() for name, x in near.tensors.items()
    }
    assert max(view.untyped_storage().nbytes() for view in far.values()) > 2**32
    inputs = near.inputs.but(**{name: far[name] for name in far if hasattr(near.inputs, name)})
    distant = Call(
        near.kind, inputs, {**near.named, **{name: far[name] for name in far if name in near.named}}
    )
    near()
    distant()
    for name, tensor in near.results().items():
        # The kernels of verify have offsets of 32 bits: rows so far apart are `step`'s.
        if near.kind is KINDS["verify"]:
            assert_same_chain(tensor, distant.results()[name])
        else:
            assert_same_bits(name, tensor, distant.results()[name])


@pytest.mark.parametrize("call", [passes.prefill, passes.decode], ids=["prefill", "decode"])
def test_the_last_slots_of_a_large_pool(algorithm, call):
    case = Case(algorithm, (5, 5), heads=4, value_heads=4, key_dim=128, value_dim=128)
    inputs = make(case)
    near = call(inputs)
    slots = 2**31 // (4 * 128 * 128) + 8
    pool, rows = torch.empty(slots, 4, 128, 128), torch.tensor([slots - 1, slots - 4], dtype=torch.int32)
    pool[rows.long()] = inputs.initial_state
    result = call(inputs.but(initial_state=pool, initial_state_indices=rows), in_place=True)
    assert_same_bits("o", near.o, result.o)
    assert_same_bits("final_state", near.final_state, pool[rows.long()])


@pytest.mark.parametrize("algorithm", ["gdn", "lightning"])
def test_the_end_of_a_long_sequence(algorithm):
    """A short sequence behind one of a million tokens gets what it gets alone."""
    H, K, short = 16, 128, 300
    T = 2**31 // (H * K) + short
    case = Case(algorithm, (T - short, short), packed=True, heads=H, value_heads=H, key_dim=K, value_dim=K)
    case = case.but(qk_l2norm=algorithm == "gdn", state=False)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).normal_(generator=draw)

    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (drawn(1, T, H, K) for _ in range(3))
    inputs = make(case.but(lengths=(1,), packed=False)).but(case=case, q=q, k=k, v=v)
    inputs.cu_seqlens = torch.tensor([0, T - short, T], dtype=torch.int32)
    if algorithm == "gdn":
        inputs.g, inputs.beta = -drawn(1, T, H, dtype=torch.float32).abs(), drawn(1, T, H).sigmoid()
    alone = inputs.but(
        case=case.but(lengths=(short,)), cu_seqlens=torch.tensor([0, short], dtype=torch.int32)
    )
    for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
        if getattr(alone, name) is not None:
            setattr(alone, name, getattr(alone, name)[:, T - short :])
    together, part = (passes.prefill(each, batch_invariant=True) for each in (inputs, alone))
    assert_same_bits("o", part.o, together.o[:, T - short :])
    assert_same_bits("final_state", part.final_state[0], together.final_state[1])
    assert together.final_state[0].isfinite().all()
