# SPDX-License-Identifier: Apache-2.0
"""The error rule on sizes that the generated problems of the common tests do not reach."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cula_testing import passes
from cula_testing.cases import ALGORITHMS, DELTA, FAMILY, GATED, Case, Inputs, make
from cula_testing.compare import assert_same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
CALLS = {
    "prefill": lambda inputs, backend: passes.prefill(inputs, backend=backend),
    "decode": lambda inputs, backend: passes.decode(inputs, backend=backend),
}


def check(case: Case, call: str = "prefill") -> None:
    passes.assert_rule(CALLS[call], make(case))


@DTYPES
@pytest.mark.parametrize(
    "count", [32, 33, 1000, 1025, 4097]
)  # scheduled beyond 32: 1,024 at a time, 4,096 in order
def test_many_short_sequences(algorithm, dtype, count):
    lengths = tuple((7 * n) % 23 for n in range(count))
    check(Case(algorithm, lengths, packed=True, heads=1, value_heads=1, dtype=dtype, pool=True))


@pytest.mark.parametrize("length", [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_the_chunk(algorithm, length):
    check(Case(algorithm, (length,), value_heads=4, key_dim=128, value_dim=128))


@DTYPES
@pytest.mark.parametrize(
    ("K", "V"),
    [
        (64, 64),
        (128, 128),
        (256, 256),
        (40, 72),
        (72, 40),
        (100, 100),
        (1, 255),
        (255, 1),
        (255, 255),
        (129, 65),
    ],
)
def test_dimensions(algorithm, dtype, K, V):
    check(
        Case(
            algorithm, (150, 0, 65), packed=True, heads=4, value_heads=4, key_dim=K, value_dim=V, dtype=dtype
        )
    )


@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k_first", [False, True], ids=["v_first", "k_first"])
@pytest.mark.parametrize("call", CALLS)
def test_states(algorithm, K, state_dtype, k_first, call):
    like = Case(
        algorithm, (70, 9, 0, 1), packed=True, key_dim=K, value_dim=K, state_dtype=state_dtype, pool=True
    )
    check(like.but(k_first=k_first), call)


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_grouped_heads(algorithm, ratio):
    check(Case(algorithm, (300, 70), packed=True, value_heads=2 * ratio, key_dim=128, value_dim=128))


@pytest.mark.parametrize("backend", ["", "sm80"])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("lengths", [(64 * 400 + 5,), (64 * 150 + 5, 0, 64 * 250)], ids=str)
@pytest.mark.parametrize("one_decay", [name for name in ALGORITHMS if FAMILY[name][0] != "channel"])
def test_heads_that_are_prepared_together(one_decay, lengths, heads, backend):
    """With so many chunks one block prepares the 8 / heads value heads that share keys, and with keys
    repeated one."""
    like = Case(
        one_decay, lengths, packed=len(lengths) > 1, heads=heads, value_heads=8, key_dim=128, value_dim=128
    )
    inputs = make(like.but(qk_l2norm=True), draw_on="cuda")
    repeated = inputs.but(
        q=inputs.q.repeat_interleave(8 // heads, 2), k=inputs.k.repeat_interleave(8 // heads, 2)
    )
    together, apart = (passes.prefill(each, backend=backend) for each in (inputs, repeated))
    for name, tensor in together.items():
        assert_same_bits(name, tensor, getattr(apart, name))


@pytest.mark.parametrize("lengths", [(8192,), (4000, 100, 4000)], ids=str)
def test_long_sequences_of_one_head(algorithm, lengths):
    """Where one GPU's worth of blocks has to come from along the sequence."""
    like = Case(
        algorithm, lengths, packed=len(lengths) > 1, heads=1, value_heads=1, key_dim=128, value_dim=128
    )
    check(like.but(decay="slow"))


@pytest.mark.parametrize("gate", ["log_decay", "softplus", "bounded"])
@pytest.mark.parametrize("decay", ["zero", "slow", "strong", "extreme", "mixed"])
@pytest.mark.parametrize("algorithm", GATED)
def test_decays(algorithm, gate, decay):
    check(Case(algorithm, (300,), heads=4, value_heads=4, key_dim=128, value_dim=128, gate=gate, decay=decay))


@pytest.mark.parametrize("cosine", [0.9, 0.95, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", DELTA)
def test_nearly_parallel_keys(algorithm, dtype, cosine):
    """Every two keys at about this cosine, no decay, beta near 1: the chunk's triangular system at its
    worst."""
    case = Case(algorithm, (512,), key_dim=128, value_dim=128, dtype=dtype, keys="collinear", decay="zero")
    inputs = make(case)
    away = torch.randn(inputs.k.shape, generator=torch.Generator("cuda").manual_seed(0))
    one = inputs.k.float()
    away = functional.normalize(away - (away * one).sum(-1, keepdim=True) * one, dim=-1)
    inputs.k = (cosine**0.5 * one + (1 - cosine) ** 0.5 * away).to(dtype)
    passes.assert_rule(CALLS["prefill"], inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", DELTA)
def test_coupled_chunks_of_many_heads(algorithm, dtype):
    """So many heads take larger blocks, which hold fewer chunks; half of the chunks take the room of two."""
    case = Case(
        algorithm, (64 * 8,), heads=120, value_heads=120, key_dim=128, value_dim=128, dtype=dtype, state=False
    )
    inputs = make(case.but(qk_l2norm=True), draw_on="cuda")
    inputs.k = inputs.k.unflatten(1, (-1, 128)).clone()
    inputs.k[:, :, :64] = inputs.k[:, :, :1]
    inputs.k = inputs.k.flatten(1, 2)
    whole = passes.prefill(inputs)
    axes = {
        **dict.fromkeys(("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"), 2),
        **dict.fromkeys(("decay", "A_log", "dt_bias"), 0),
    }
    for first in range(0, 120, 40):
        tensors = {name: getattr(inputs, name) for name in axes if getattr(inputs, name) is not None}
        fewer = {name: x.narrow(axes[name], first, 40) for name, x in tensors.items()}
        part = passes.prefill(inputs.but(case=inputs.case.but(heads=40, value_heads=40), **fewer))
        assert_same_bits("o", whole.o.narrow(2, first, 40), part.o)
        assert_same_bits("final_state", whole.final_state.narrow(1, first, 40), part.final_state)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("K", "V", "rows"),
    [(64, 64, 1400), (64, 128, 700), (128, 128, 1), (128, 128, 33), (128, 128, 400), (256, 256, 40)],
)
def test_decode_of_many_rows(algorithm, K, V, rows, state_dtype):
    """With few rows and with many: CTAs have more of a state's rows where these occupy every multiprocessor
    (launch_packed.cuh)."""
    sizes = {"heads": 4, "value_heads": 4, "key_dim": K, "value_dim": V}
    check(Case(algorithm, (1,) * rows, pool=True, state_dtype=state_dtype, **sizes), "decode")


@pytest.mark.parametrize("keeps", [True, False], ids=["snapshots", "reads_only"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("K", "V", "rows"), [(64, 100, 256), (128, 128, 3), (128, 128, 150), (256, 128, 40)])
def test_verify_of_many_rows(algorithm, K, V, rows, state_dtype, keeps):
    """One tile and two a CTA (launch_packed.cuh). Without snapshots a CTA ends once its outputs are stored,
    and every sequence has four tokens; with them 0 to 4, as the table of slots allows."""
    lengths = tuple(4 - n % 5 for n in range(rows)) if keeps else (4,) * rows
    sizes = {"heads": 4, "value_heads": 4, "key_dim": K, "value_dim": V}
    case = Case(algorithm, lengths, packed=keeps, pool=True, state_dtype=state_dtype, **sizes)

    def call(inputs: Inputs, backend: str) -> passes.Result:
        room = passes.empty_states(inputs, 4 * rows).zero_().unflatten(0, (rows, 4)) if keeps else None
        table = torch.zeros(rows, 4, dtype=torch.int32, device=inputs.q.device) if keeps else None
        return passes.verify(inputs, backend=backend, snapshots=room, state_indices=table)

    passes.assert_rule(call, make(case))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [64, 128])
def test_verify_of_one_row_of_many(algorithm, K, state_dtype):
    """A CTA of two tiles gives the bits of one."""
    sizes = {"heads": 4, "value_heads": 4, "key_dim": K, "value_dim": 128}
    case = Case(algorithm, (4,) * 150, pool=True, state_dtype=state_dtype, **sizes)
    inputs = make(case)
    names = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")
    of_one = {name: x[7:8] for name in names if (x := getattr(inputs, name)) is not None}
    of_one["initial_state_indices"] = inputs.initial_state_indices[7:8]

    def call(given: Inputs) -> passes.Result:
        count = given.case.sequences
        return passes.verify(given, snapshots=passes.empty_states(given, 4 * count).unflatten(0, (count, 4)))

    whole, one = call(inputs), call(inputs.but(case=case.but(lengths=(4,)), **of_one))
    assert_same_bits("o", whole.o[7:8], one.o)
    assert_same_bits("snapshots", whole.snapshots[7:8], one.snapshots)


@pytest.mark.parametrize("S", [1, 2, 5, 8, 16])
def test_verify_of_many_drafts(algorithm, S):
    def call(inputs: Inputs, backend: str) -> passes.Result:
        room = passes.empty_states(inputs, 3 * S).unflatten(0, (3, S))
        return passes.verify(inputs, backend=backend, snapshots=room)

    passes.assert_rule(call, make(Case(algorithm, (S,) * 3, key_dim=128, value_dim=128)))
