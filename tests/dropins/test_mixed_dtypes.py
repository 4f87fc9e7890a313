# SPDX-License-Identifier: Apache-2.0
"""FLA's recurrent functions take each input in its own dtype: o has that of v or of q, as FLA's has, and
nothing is rounded on the way that the wider dtype could hold."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

FLOAT64 = pytest.mark.cpu_only("float64 is the reference's")


def of_gdn(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta}


def of_kda(x: Inputs) -> dict:
    return {**of_gdn(x), "A_log": x.A_log, "dt_bias": x.dt_bias}


def of_delta(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta}


def of_gla(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "gk": x.g}


def of_simple_gla(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g}


def of_lightning(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "layer_idx": 1, "num_layers": 4}


def of_qkv(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v}


def of_gdn2(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "b": x.erase, "w": x.beta}


def of_rwkv7(x: Inputs) -> dict:
    return {"r": x.q, "w": x.g, "k": x.k, "v": x.v, "a": x.a_key, "b": x.b_key}


def of_a_layer(x: Inputs) -> dict:
    return {"r": x.q, "w": x.g, "k": x.k, "v": x.v, "kk": x.a_key, "a": x.b_key}


def of_dplr(x: Inputs) -> dict:
    return {"q": x.q, "k": x.k, "v": x.v, "a": x.a_key, "b": x.b_key, "gk": x.g}


@pytest.mark.parametrize("wide", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("run", "algorithm", "arguments", "like"),
    [
        (cula.kda.fused_recurrent_kda, "kda", of_kda, "v"),
        (cula.delta_rule.fused_recurrent_delta_rule, "delta", of_delta, "q"),
        (cula.gla.fused_recurrent_gla, "gla", of_gla, "q"),
        (cula.simple_gla.fused_recurrent_simple_gla, "simple_gla", of_simple_gla, "q"),
        (cula.retention.fused_recurrent_retention, "lightning", of_qkv, "q"),
        (cula.lightning.fused_recurrent_lightning_attn, "lightning", of_lightning, "q"),
        (cula.linear_attn.fused_recurrent_linear_attn, "linear", of_qkv, "q"),
        (cula.gdn.fused_recurrent_gated_delta_rule, "gdn", of_gdn, "v"),
        (cula.gdn2.fused_recurrent_gdn2, "gdn2", of_gdn2, "v"),
        (cula.rwkv7.fused_recurrent_rwkv7, "rwkv7", of_rwkv7, "v"),
        (cula.rwkv7.fused_mul_recurrent_rwkv7, "rwkv7", of_a_layer, "v"),
        (cula.generalized_delta_rule.fused_recurrent_dplr_delta_rule, "rwkv7", of_dplr, "v"),
    ],
)
def test_o_has_the_dtype_of_one(run, algorithm, arguments, like, wide):
    x = make(Case(algorithm, (20,), beta_per_value=algorithm == "gdn2"))
    o, state = run(**arguments(x.but(**{wide: getattr(x, wide).float()})), output_final_state=True)
    floats = x.but(q=x.q.float(), k=x.k.float(), v=x.v.float())
    wanted, wanted_state = run(**arguments(floats), output_final_state=True)
    assert o.dtype == (torch.float32 if wide == like else torch.bfloat16)
    assert_same_bits("o", wanted.to(o.dtype), o)
    assert_same_bits("state", wanted_state, state)


@pytest.mark.parametrize("wide", ["q", "k", "v"])
def test_dtypes_of_a_normalised_o(wide):
    x = make(Case("linear", (20,), state=False))
    x = x.but(q=x.q.abs(), k=x.k.abs())
    run = cula.linear_attn.fused_recurrent_linear_attn
    given = x.but(**{wide: getattr(x, wide).float()})
    o, (state, z) = run(given.q, given.k, given.v, normalize=True, output_final_state=True)
    floats = x.q.float(), x.k.float(), x.v.float()
    wanted, (wanted_state, wanted_z) = run(*floats, normalize=True, output_final_state=True)
    assert o.dtype == torch.promote_types(given.q.dtype, given.k.dtype)
    assert z.dtype == given.k.dtype
    torch.testing.assert_close(o.float(), wanted, rtol=2e-2, atol=2e-2)
    assert_same_bits("state", wanted_state, state)
    assert_same_bits("z", wanted_z.to(z.dtype), z)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32], ids=str)
def test_dtypes_that_no_call_takes(name, dtype):
    """Refused by their own names, beside those that would be promoted."""
    x = make(Case("kda", (5,)))
    with pytest.raises(ValueError, match=r"[qkv] must have "):
        cula.kda.fused_recurrent_kda(**of_kda(x.but(**{name: getattr(x, name).to(dtype)})))


def test_two_decays_of_gdn_add_up_in_float32():
    x = make(Case("kda", (20,), gate_dtype=torch.bfloat16))
    run, g, gk = cula.gdn.fused_recurrent_gated_delta_rule, x.g[..., 0] / 3, x.g
    for one, other in ((g, gk), (g.float(), gk), (g, gk.float())):
        o, state = run(x.q, x.k, x.v, one, other, beta=x.beta, output_final_state=True)
        wanted, wanted_state = run(
            x.q, x.k, x.v, gk=gk.float() + g.float()[..., None], beta=x.beta, output_final_state=True
        )
        assert_same_bits("o", wanted, o)
        assert_same_bits("state", wanted_state, state)


@FLOAT64
def test_two_decays_of_gdn_add_up_in_float64():
    x = make(Case("kda", (5,), dtype=torch.float64, gate_dtype=torch.float64))
    g = x.g[..., 0] / 3
    o, _ = cula.gdn.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, g, x.g, beta=x.beta)
    wanted, _ = cula.gdn.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, gk=x.g + g[..., None], beta=x.beta)
    assert_same_bits("o", wanted, o)


@FLOAT64
def test_gradcheck_of_what_a_layer_has():
    x = make(Case("rwkv7", (5,), key_dim=4, value_dim=3, state=False)).double()
    leaves = [tensor.detach().requires_grad_() for tensor in of_a_layer(x).values()]

    def run(*values):
        return cula.rwkv7.fused_mul_recurrent_rwkv7(*values, output_final_state=True)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_a_sum_of_keys_in_float32_stays_so(kind):
    """600 tokens in a call each. In bfloat16 the sum of their keys would stop at 128."""
    run = getattr(cula.linear_attn, f"{kind}_linear_attn")
    x = torch.full((1, 1, 2, 16), 0.5, dtype=torch.bfloat16)
    states = torch.zeros(1, 2, 16, 16), torch.zeros(1, 1, 2, 16)
    for _ in range(600):
        o, states = run(x, x, x, initial_state=states, output_final_state=True, normalize=True)
    assert states[1].dtype == o.dtype == torch.float32
    assert (states[1] == 300).all()


@pytest.mark.parametrize("z", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_linear_attn(z):
    """Those to which FLA's sum and quotient promote."""
    x = make(Case("linear", (20,), state=False))
    given = None if z is None else (None, torch.ones(1, 1, 2, 64, dtype=z))
    o, states = cula.linear_attn.chunk_linear_attn(x.q, x.k, x.v, initial_state=given)
    wanted = torch.bfloat16 if z is None else torch.promote_types(torch.bfloat16, z)
    assert o.dtype == states[1].dtype == wanted


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_sum_of_keys_has_16_bits_at_least(dtype):
    x = make(Case("linear", (20,), state=False))
    with pytest.raises(ValueError, match="initial_state must have a floating-point dtype of 16 bits"):
        cula.linear_attn.chunk_linear_attn(
            x.q, x.k, x.v, initial_state=(None, torch.ones(1, 1, 2, 64).to(dtype))
        )


@FLOAT64
def test_gradcheck_of_linear_attn():
    x = make(Case("linear", (5,), key_dim=4, value_dim=3)).double()
    named = x.q.abs(), x.k.abs(), x.v, x.initial_state.mT, torch.rand(1, 1, 2, 4, dtype=torch.float64)
    leaves = [tensor.detach().requires_grad_() for tensor in named]

    def run(q, k, v, state, z):
        o, states = cula.linear_attn.chunk_linear_attn(
            q, k, v, initial_state=(state, z), output_final_state=True
        )
        return o, *states

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_slopes_may_be_integers(dtype):
    x = make(Case("lightning", (20,), scale=1.0))
    slopes = torch.tensor([1, 3], dtype=dtype)
    for one, other in zip(lightning(x, slopes), lightning(x, slopes.float()), strict=True):
        assert_same_bits("integers", other, one)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
def test_slopes_are_real_numbers(dtype):
    x, slopes = make(Case("lightning", (20,), scale=1.0)), torch.ones(2, dtype=dtype)
    for function in (prompt, packed_prompt, next_token):
        with pytest.raises(ValueError, match=r"decay(_scales)? must have a floating or an integer dtype"):
            function(x, slopes)


def prompt(x: Inputs, slopes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return cula.lightning.lightning_attn_fwd(x.q, x.k, x.v, slopes, output_final_state=True)


def packed_prompt(x: Inputs, slopes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ends = torch.tensor([0, 5, 20], dtype=torch.int32)
    return cula.lightning.lightning_attn_fwd_varlen(x.q, x.k, x.v, slopes, ends)


def next_token(x: Inputs, slopes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = x.q[:, 0], x.k[:, 0], x.v[:, 0]
    s, out = x.initial_state.clone(), torch.zeros_like(v)
    cula.lightning.linear_attention_decode(
        q, k, v, s, out, 1.0, 0, 0, 0, 0, 0, None, slopes, HEAD_DIM=64, K_SPLIT_DIM=64, V_SPLIT_DIM=8
    )
    return out, s


def lightning(x: Inputs, slopes: torch.Tensor) -> list[torch.Tensor]:
    return [y for function in (prompt, packed_prompt, next_token) for y in function(x, slopes)]
