# SPDX-License-Identifier: Apache-2.0
"""Rules with low-rank keys: what they are beside the others of the family, on every target, and gradients of
sequences that are walked in groups of blocks."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing import device, gradients, passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits, errors

TARGETS = device.able(torch.float32, algorithm="rwkv7")


@pytest.mark.parametrize("backend", TARGETS)
def test_kda_is_one_of_them(backend):
    """Its key reads what has decayed, and writes beta times what it is short of."""
    x = make(Case("kda", (130, 7, 0), packed=True, value_heads=4, dtype=torch.float32))
    k = x.k.repeat_interleave(2, dim=2)
    beta = x.beta[..., None]
    named = {
        "initial_state": x.initial_state,
        "output_final_state": True,
        "cu_seqlens": x.cu_seqlens,
        "backend": backend,
    }
    wanted = cula.cula_kda(x.q, x.k, x.v, x.g, x.beta, **named)
    found = cula.cula_rwkv7(x.q, x.k, beta * x.v, g=x.g, a_key=-x.g.exp() * k, b_key=beta * k, **named)
    for one, other in zip(found, wanted, strict=True):
        assert errors(one, other.double()).rms < 1e-5


@pytest.mark.parametrize("backend", TARGETS)
def test_without_low_rank_keys_it_is_gla(backend):
    x = make(Case("rwkv7", (70, 70), dtype=torch.float32))
    named = {"initial_state": x.initial_state, "output_final_state": True, "backend": backend}
    wanted = cula.cula_gla(x.q, x.k, x.v, x.g, **named)
    for zero in ("a_key", "b_key"):
        keys = {name: getattr(x, name) for name in ("a_key", "b_key")} | {zero: torch.zeros_like(x.a_key)}
        found = cula.cula_rwkv7(x.q, x.k, x.v, g=x.g, **keys, **named)
        for one, other in zip(found, wanted, strict=True):
            assert errors(one, other.double()).rms < 1e-6


@pytest.mark.parametrize("backend", ["reference", "reference:naive", *TARGETS])
def test_the_state_is_read_before_it_decays(backend):
    x = make(Case("rwkv7", (1, 1), dtype=torch.float32, decay="extreme", scale=1.0))
    if backend.startswith("reference") and device.kind() == "cuda":
        pytest.skip("it runs on CPUs")
    if backend == "reference":
        x = x.double()
    found = passes.prefill(x, backend=backend)
    read = torch.einsum("nhvk,nthk->nthv", x.initial_state.double(), x.a_key.double())
    wanted = torch.einsum("nthv,nthk->nhvk", read, x.b_key.double())
    wanted += torch.einsum("nthv,nthk->nhvk", x.v.double(), x.k.double())
    assert errors(found.final_state, wanted).rms < 1e-6
    o = torch.einsum("nhvk,nthk->nthv", wanted, x.q.double())
    assert errors(found.o, o).rms < 1e-6


@pytest.mark.parametrize("decay", ["slow", "mixed", "extreme"])
@pytest.mark.parametrize("key_dim", [16, 64, 72, 128])
@pytest.mark.parametrize("backend", device.able(torch.bfloat16, algorithm="rwkv7"))
def test_chunks_of_any_decays(backend, key_dim, decay):
    """GPUs make two rows of a token, and a row that reads has another decay than one that writes."""
    case = Case(
        "rwkv7", (130, 0, 7, 64), packed=True, value_heads=4, key_dim=key_dim, value_dim=80, decay=decay
    )  # fmt: skip
    passes.assert_rule(lambda inputs, backend: passes.prefill(inputs, backend=backend), make(case), backend)
    gradients.assert_rule(make(case.but(dtype=torch.float16)))


@pytest.mark.parametrize("length", [4096, 4097, 4140])
def test_gradients_of_long_sequences(length):
    """Up to 4,096 tokens groups are single blocks of 16."""
    case = Case("rwkv7", (length, 5), packed=True, heads=1, value_heads=2, key_dim=8, value_dim=24)
    gradients.assert_rule(make(case.but(dtype=torch.float32, decay="slow", gate="bounded")))


def test_a_gradient_has_the_same_bits_whatever_else_is_wanted():
    inputs = make(Case("rwkv7", (70, 70), value_heads=4, gate="softplus"))
    d_o, d_final = gradients.upstream(inputs)
    whole = gradients.backward(inputs, d_o, d_final)
    for name in whole:
        alone = gradients.backward(inputs, d_o, d_final, wanted=[name])
        assert_same_bits(f"d_{name}", whole[name], alone[name])


def test_all_arguments_of_one_shape_go_by_name():
    x = make(Case("rwkv7", (4,), state=False))
    with pytest.raises(TypeError, match="positional argument"):
        cula.cula_rwkv7(x.q, x.g, x.k, x.v, x.a_key, x.b_key)
