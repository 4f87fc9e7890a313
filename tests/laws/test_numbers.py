# SPDX-License-Identifier: Apache-2.0
"""Options and gates at the ends of their ranges (docs/api.md, "Numbers")."""

from __future__ import annotations

import pytest
import torch

from cula_testing import device, passes
from cula_testing.arguments import arguments, refused
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

# As assert_rule calls them.
PASSES = {
    "prefill": lambda inputs, backend: passes.prefill(inputs, backend=backend),
    "decode": lambda inputs, backend: passes.decode(inputs, backend=backend),
    "segment": lambda inputs, backend: passes.segment(inputs, backend=backend),
}
INFINITE = [float("inf"), float("-inf"), 1e39, float("nan")]
STRONG = {"gate": "bounded", "lower_bound": -80.0, "qk_l2norm": True}


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify"])
@pytest.mark.parametrize("value", INFINITE)
def test_scale_is_a_number(pass_name, value):
    assert refused(pass_name, {**arguments(pass_name), "scale": value}).startswith(
        f"{pass_name}: scale must be a finite float32 number, got "
    )


@pytest.mark.parametrize("value", [float("-inf"), -1e39, float("nan")])
def test_lower_bound_is_a_number(value):
    sentence = refused("prefill", {**arguments("prefill"), "gate": "bounded", "lower_bound": value})
    assert sentence.startswith("prefill: lower_bound must be ")


def bounded(algorithm: str, call, lengths: tuple[int, ...], shift: float, A_log: float, **fields):
    """Raw gates around `shift`: of a channel that hardly decays beside the bound."""
    inputs = make(Case(algorithm, lengths, packed=True, dt_bias=False, **{**STRONG, **fields}))
    inputs.g.copy_(torch.randn(inputs.g.shape) + shift)
    inputs.A_log.fill_(A_log)
    result = passes.assert_rule(call, inputs, fields.get("backend", ""))
    for name, tensor in result.items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("shift", [-4.0, -30.0])
@pytest.mark.parametrize("A_log", [1.5, 2.6])
@pytest.mark.parametrize("dims", [(100, 100), (72, 40), (130, 200), (64, 64), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_far_below_zero(target, shift, A_log, dims, dtype):
    """Channels that pad K must not decay: their zeros would meet factors out of range."""
    if dtype == torch.float16 and target not in device.able(dtype):
        pytest.skip(f"{target} takes no float16")
    if dims[0] > 128 and target == "sm90":
        pytest.skip("sm90 takes K up to 128")
    fields = {"key_dim": dims[0], "value_dim": dims[1], "dtype": dtype, "backend": target}
    bounded("kda", PASSES["prefill"], (32, 17), shift, A_log, **fields)
    if device.serves(target, "segment"):
        bounded("kda", PASSES["segment"], (32, 17), shift, A_log, **fields)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("A_log", [5.0, 20.0, 89.0, 1000.0])
@pytest.mark.parametrize("pass_name", ["prefill", "decode"])
@pytest.mark.parametrize("key_dim", [128, 100])
def test_steep_gates_stay_numbers(gate, A_log, pass_name, key_dim):
    """exp(A_log) counts as at most 1e30, so that a gate of zero times it is no NaN."""
    inputs = make(
        Case("kda", (70, 3), packed=True, gate=gate, dt_bias=False, key_dim=key_dim, qk_l2norm=True)
    )
    inputs.g.copy_(torch.where(torch.rand(inputs.g.shape) < 0.5, 0.0, torch.randn(inputs.g.shape) - 200.0))
    inputs.A_log.fill_(A_log)
    for name, tensor in passes.assert_rule(PASSES[pass_name], inputs).items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("strength", ["beta near 2", "a large state"])
@pytest.mark.parametrize("key_dim", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_key_channels(algorithm, strength, key_dim, dtype):
    """Chunks would compute as a difference what tokens compute as a product: such calls go token by token.
    All rows of a head's state share the roundings of its keys, so that of one head the errors of two float32
    recurrences are two random numbers: here are many."""
    case = Case(
        algorithm,
        (300,) * 4,
        heads=4,
        value_heads=4,
        key_dim=key_dim,
        value_dim=32,
        qk_l2norm=True,
        dtype=dtype,
    )
    inputs = make(case)
    if inputs.beta is not None:
        inputs.beta.fill_(1.99)
    if strength == "a large state":
        inputs.initial_state.mul_(1e6)
    passes.assert_rule(PASSES["prefill"], inputs)


def test_a_token_that_is_no_number_reaches_no_other_sequence(algorithm):
    inputs = make(Case(algorithm, (70, 66, 5), packed=True))
    clean = passes.prefill(inputs)
    inputs.v[0, inputs.span("v", 80, 81)] = float("nan")
    result = passes.prefill(inputs)
    for tokens in (slice(0, 70), slice(136, 141)):
        assert_same_bits("o", clean.o[:, tokens], result.o[:, tokens])
    assert result.o[0, 80].isnan().all()
    assert_same_bits("states", clean.final_state[[0, 2]], result.final_state[[0, 2]])


@pytest.mark.parametrize("word", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], ids=hex)
@pytest.mark.parametrize("tokens", [1, 70])
def test_a_state_that_is_no_number(target, algorithm, word, tokens):
    """Whatever its bits are: those of GPUs round up into the sign."""
    inputs = make(Case(algorithm, (tokens,), value_dim=16, decay="slow", state=True))
    inputs.initial_state.fill_(1).view(torch.int32).fill_(word)
    found = passes.prefill(inputs, backend=target)
    assert found.o.isnan().all()
    assert found.final_state.isnan().all()
    states = make(inputs.case.but(state_dtype=torch.bfloat16))
    final = passes.prefill(inputs.but(case=states.case), backend=target).final_state
    assert final.dtype == torch.bfloat16
    assert final.isnan().all()


@pytest.mark.cpu_only("about the exponential of the CPU's targets")
@pytest.mark.parametrize("tokens", [1, 2])  # the second neither decays nor writes
def test_decays_at_the_ends_of_the_exponential(target, tokens):
    """A state of ones, which one token decays: exp of its log decay, zero where it would be subnormal."""
    ends = [float("nan"), float("-inf"), float("inf"), -1e30, -103.9, -87.4, -87.0, -86.9, -1e-40, 0.0, 1e-40]
    ends += [87.9, 89.0, 1e30, -0.5, -17.0]
    inputs = make(Case("gla", (tokens,), key_dim=16, value_dim=16, gate_dtype=torch.float32))
    for name in "qkv":
        getattr(inputs, name).zero_()
    inputs.g.zero_()
    inputs.g[:, 0] = torch.tensor(ends)
    inputs.initial_state.fill_(1)
    found = passes.prefill(inputs, backend=target).final_state
    wanted = torch.tensor(ends).double().exp()
    wanted[wanted < 2.0**-126] = 0
    wanted[wanted > torch.finfo(torch.float32).max] = float("inf")
    torch.testing.assert_close(
        found.double(), wanted.expand(found.shape), rtol=2.0**-21, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("algorithm", ["gdn", "kda"])
@pytest.mark.parametrize("what", ["g", "A_log", "dt_bias"])
@pytest.mark.parametrize("key_dim", [8, 64])  # token by token, and in chunks
def test_a_raw_gate_that_is_no_number(target, gate, algorithm, what, key_dim):
    """It reaches its head from its token on, and no other head."""
    if target == "sm90" and key_dim < 16:
        pytest.skip("sm90 takes no K below 16")
    inputs = make(
        Case(algorithm, (70, 3), packed=True, gate=gate, key_dim=key_dim, value_dim=64, value_heads=4)
    )
    clean = passes.prefill(inputs, backend=target)
    given = {"g": inputs.g[0, 2], "A_log": inputs.A_log, "dt_bias": inputs.dt_bias}[what]
    given[1] = float("nan")
    found = passes.prefill(inputs, backend=target)
    assert found.o[0, 2:70, 1].isnan().all()
    assert found.final_state[0, 1].isnan().all()
    for head in (0, 2, 3):
        assert_same_bits("o", clean.o[:, :, head], found.o[:, :, head])
        assert_same_bits("states", clean.final_state[:, head], found.final_state[:, head])
