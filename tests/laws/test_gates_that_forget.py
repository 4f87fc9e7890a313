# SPDX-License-Identifier: Apache-2.0
"""Prefills whose heads forget, remember, or do either by a hair, where a kernel may start a segment of a
sequence without what was before: by the error rule, head by head and stretch by stretch, so that what is
large hides nothing of what is small."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula_testing import passes
from cula_testing.cases import DELTA, FAMILY, Case, Inputs, make
from cula_testing.compare import assert_accurate, assert_same_bits

NAN = float("nan")
ALGORITHMS = ("kda", "gdn", "gla", "simple_gla")
BY_CHANNEL = tuple(name for name in ALGORITHMS if FAMILY[name][0] == "channel")
BITS = 64  # a head has forgotten what is below 2^-64 of its size
STRETCH = 128
HEADS = 4
KEEPS = -1e-6  # a log decay that 2,048 tokens do not show
FORGETS = -2.5

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
each_length = pytest.mark.parametrize("tokens", [512, 2048])
each_gate = pytest.mark.parametrize("gate", ["log_decay", "bounded"])


def prefill(inputs: Inputs, backend: str = "") -> passes.Result:
    return passes.prefill(inputs, backend=backend)


def prefill_uncut(inputs: Inputs, backend: str = "") -> passes.Result:
    """For what a GPU's segments of delta rules may leave out by contract (docs/api.md)."""
    return passes.prefill(inputs, backend=backend, batch_invariant=inputs.case.algorithm in DELTA)


def draw(algorithm: str, lengths: tuple[int, ...], gate: str, log_decays: torch.Tensor) -> Inputs:
    """Of four heads with these log decays, [T or 1, HV, K or 1], at least -5."""
    delta = algorithm in DELTA
    case = Case(
        algorithm, lengths, packed=len(lengths) > 1, heads=HEADS, value_heads=HEADS, key_dim=128,
        value_dim=128, gate=gate, A_log=gate == "bounded", dt_bias=False, qk_l2norm=delta,
        beta_is_logit=delta,
    )  # fmt: skip
    inputs = make(case)
    wanted = log_decays.double()
    if algorithm not in BY_CHANNEL:
        assert wanted.shape[-1] == 1
        wanted = wanted[..., 0]
    g = wanted if gate == "log_decay" else torch.logit(wanted / case.lower_bound)
    inputs.g.copy_(g.expand(inputs.g.shape[1:]))
    if inputs.A_log is not None:
        inputs.A_log.zero_()
    return inputs


def forgotten_after(inputs: Inputs) -> list[int]:
    """Of each head, in tokens."""
    named = {"cu_seqlens": inputs.cu_seqlens, "bound": 2.0**-BITS}
    if inputs.case.gate == "bounded":
        named |= {"A_log": inputs.A_log, "lower_bound": inputs.case.lower_bound}
    return cula.tokens_to_forget(inputs.g, **named).tolist()


def assert_rule(inputs: Inputs, backend: str = "", call=prefill) -> passes.Result:
    """On every head's final states, and on its outputs in stretches of 128 tokens."""
    found, oracle, naive = passes.three(call, inputs, backend)
    for head in range(HEADS):
        states = (result.final_state[:, head] for result in (found, oracle, naive))
        assert_accurate(f"states of head {head}", *states, inputs.q.dtype)
        for start in range(0, sum(inputs.case.lengths), STRETCH):
            part = slice(start, start + STRETCH)
            rows = (result.o[:, part, head] for result in (found, oracle, naive))
            assert_accurate(f"o of head {head} from token {start} on", *rows, inputs.q.dtype)
    return found


def per_head(*log_decays: float) -> torch.Tensor:
    """[1, HV, 1]"""
    return torch.tensor(log_decays, dtype=torch.float64)[None, :, None]


def edge(tokens: int, bits: float) -> float:
    """The log decay of each of so many tokens that together decay to 2^-bits."""
    return -bits * math.log(2) / tokens


def by_a_hair(algorithm: str, tokens: int, gate: str) -> Inputs:
    """After half a chunk of 32 tokens, and after a chunk of 64, two heads each are a bit above and below."""
    decays = per_head(edge(16, BITS - 1), edge(16, BITS + 1), edge(64, BITS - 1), edge(64, BITS + 1))
    inputs = draw(algorithm, (tokens,), gate, decays)
    assert forgotten_after(inputs) == [17, 16, 66, 64]
    return inputs


@each_gate
@each_algorithm
def test_just_above_and_just_below(target, algorithm, gate):
    assert_rule(by_a_hair(algorithm, 512, gate), target)


@each_gate
@each_algorithm
def test_just_above_and_just_below_in_a_long_sequence(algorithm, gate):
    assert_rule(by_a_hair(algorithm, 2048, gate))


@each_length
@each_algorithm
def test_just_above_and_just_below_at_a_boundary_alone(algorithm, tokens):
    """Tokens that keep, but for one before each boundary of 64 that is at the bound on its own."""
    decays = per_head(*[KEEPS] * HEADS).repeat(tokens, 1, 1)
    steep = per_head(edge(1, BITS - 1), edge(1, BITS + 1), edge(1, BITS - 1), edge(1, BITS + 1))
    decays[63::64] = steep
    decays[:, 2:] = KEEPS
    decays[62::64, 2:], decays[64::64, 2:] = steep[0, 2:], steep[0, 2:]  # a token early, and one late
    inputs = draw(algorithm, (tokens,), "log_decay", decays)
    assert forgotten_after(inputs)[1] == 64
    assert_rule(inputs)


@each_gate
@each_length
@pytest.mark.parametrize("algorithm", BY_CHANNEL)
def test_one_channel_of_128_remembers(algorithm, tokens, gate):
    decays = per_head(*[FORGETS] * HEADS).repeat(1, 1, 128)
    decays[:, 1, 77] = KEEPS
    decays[:, 3, 0] = edge(tokens, BITS - 1)  # to the last token
    inputs = draw(algorithm, (tokens,), gate, decays)
    assert forgotten_after(inputs) == [18, -1, 18, -1]
    found = assert_rule(inputs)
    kept = found.final_state[0].abs().amax(-2)  # [HV, K]
    assert kept[1].argmax() == 77


@pytest.mark.parametrize("before", [32, 64])
@pytest.mark.parametrize(
    ("gate", "old", "new"), [("log_decay", 1e30, 1e-6), ("bounded", 1e4, 1e-20)], ids=["given", "bounded"]
)
@each_length
@each_algorithm
def test_huge_values_before_tiny_ones(algorithm, tokens, gate, old, new, before):
    """The last large value lies a chunk before the middle, in which by decays alone it is forgotten:
    but 2^-65 of it is more than the new values are."""
    middle = tokens // 2
    change = middle - before
    decays = per_head(edge(32, BITS + 1), edge(64, BITS - 1), edge(64, BITS + 1), KEEPS)
    inputs = draw(algorithm, (tokens,), gate, decays)
    v = inputs.v.float()
    v[:, :change] *= old
    v[:, change:] *= new
    inputs = inputs.but(v=v.to(inputs.v.dtype), initial_state=inputs.initial_state * old)
    found = assert_rule(inputs, call=prefill_uncut)

    case = inputs.case.but(lengths=(tokens - change,))
    fresh = torch.zeros_like(inputs.initial_state)
    without = prefill(inputs.but(case=case).tokens(change, tokens).but(initial_state=fresh))
    at_the_edge = [0] if before == 32 else [1, 2]
    new_alone, all_there = (o[0, :, at_the_edge].abs().amax((0, 2)) for o in (without.o, found.o[:, middle:]))
    assert (all_there > 10 * new_alone).all(), "what is left of the old values shows"


@each_gate
@each_length
@each_algorithm
def test_heads_of_every_kind_in_one_call(algorithm, tokens, gate):
    """One that forgets, one that keeps, one that begins to keep and one that begins to forget halfway."""
    decays = per_head(FORGETS, KEEPS, FORGETS, KEEPS).repeat(tokens, 1, 1)
    decays[tokens // 2 + 5 :, 2], decays[tokens // 2 + 5 :, 3] = KEEPS, FORGETS
    inputs = draw(algorithm, (tokens,), gate, decays)
    assert forgotten_after(inputs)[:2] == [18, -1]
    assert_rule(inputs)


@each_gate
@each_algorithm
def test_packed_sequences(algorithm, gate):
    """What forgets beside what keeps, and sequences shorter than what is forgotten."""
    lengths = (700, 0, 17, 1, 300, 64, 966)
    decays = per_head(FORGETS, KEEPS, edge(32, BITS - 1), edge(32, BITS + 1)).repeat(sum(lengths), 1, 1)
    decays[718:1018] = KEEPS  # one whole sequence
    inputs = draw(algorithm, lengths, gate, decays)
    assert forgotten_after(inputs) == [301, -1, 301, 301]  # tokens: what keeps has no more
    assert_rule(inputs)


@pytest.mark.parametrize("what", ["v", "k", "g", "initial_state"])
@each_length
@each_algorithm
def test_what_is_no_number_is_not_forgotten(algorithm, tokens, what):
    """NaN times a decay of zero is NaN: it reaches what comes after, in its head alone."""
    inputs = draw(algorithm, (tokens,), "log_decay", per_head(FORGETS, FORGETS, KEEPS, FORGETS))
    clean = prefill_uncut(inputs)
    where = {"initial_state": (0, 1, 3, 5), "g": (0, 5, 1)}.get(what, (0, 5, 1, 3))
    getattr(inputs, what)[where] = NAN
    found = prefill_uncut(inputs)
    bad = found.o[0, 64:, 1]
    channel = 3 if what in ("v", "initial_state") else slice(None)
    assert bad[:, channel].isnan().all()
    assert found.final_state[0, 1, channel].isnan().any(-1).all()
    for head in (0, 2, 3):
        assert_same_bits("o", found.o[:, :, head], clean.o[:, :, head])
        assert_same_bits("states", found.final_state[:, head], clean.final_state[:, head])
