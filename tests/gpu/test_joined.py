# SPDX-License-Identifier: Apache-2.0
"""Segments of Hopper's fused prefill, which start from zero at once and add what each lacks of the states
before it (docs/design/joined.md)."""

from __future__ import annotations

import math

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

JOINED = "sm90:joined"
BOUND = -5.0
FORGETS, KEEPS = -2.5, -1e-6  # log decays of a token
TOKENS = 64 * 40
HEADS = 4
pytestmark = pytest.mark.skipif("sm90" not in device.able(torch.bfloat16), reason="sm90 does not run here")


def inputs_of(lengths: tuple[int, ...] = (TOKENS,), **fields) -> Inputs:
    fields = {"heads": HEADS, "value_heads": HEADS, "key_dim": 128, "value_dim": 128, **fields}
    return make(
        Case(
            "kda", lengths, gate="bounded", gate_dtype=torch.bfloat16, dtype=torch.bfloat16, A_log=False,
            dt_bias=False, qk_l2norm=True, beta_is_logit=True, lower_bound=BOUND, **fields,
        )
    )  # fmt: skip


def decaying(inputs: Inputs, log_decays: torch.Tensor) -> Inputs:
    """With these log decays, which extend to [T, HV, K]."""
    raw = torch.logit(log_decays.double() / BOUND).expand(inputs.g.shape[1:])
    return inputs.but(g=raw.to(inputs.g).expand_as(inputs.g).contiguous())


def per_head(*log_decays: float) -> torch.Tensor:
    return torch.tensor(log_decays, dtype=torch.float64, device="cuda")[None, :, None]


def run(inputs: Inputs, backend: str = JOINED) -> passes.Result:
    return passes.prefill(inputs, backend=backend)


def obeys_the_rule(inputs: Inputs) -> passes.Result:
    passes.assert_rule(run, inputs)
    return run(inputs)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lengths": (TOKENS - 29,)},
        {"lengths": (1100, 1100)},
        {"lengths": (1500, 0, 700, 3, 64), "packed": True, "tail": 9},
        {"lengths": (64,) * 3 + (1100,), "packed": True},
        {"heads": 2, "value_heads": 8},
        {"state": False},
        {"key_dim": 96, "value_dim": 72},
        {"value_dim": 256},
        {"state_dtype": torch.bfloat16, "k_first": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["forget", "keep", "both", "drawn"])
def test_every_call_obeys_the_rule(fields, kind):
    inputs = inputs_of(**fields)
    heads = inputs.g.shape[2]
    decays = {"forget": (FORGETS,), "keep": (KEEPS,), "both": (FORGETS, KEEPS)}
    if kind != "drawn":
        inputs = decaying(inputs, per_head(*(decays[kind] * heads)[:heads]))
    obeys_the_rule(inputs)


def takes(inputs: Inputs) -> bool:
    try:
        run(inputs)
    except ValueError:
        return False
    return True


FEW_HEADS = [
    (1, {"lengths": (16384,)}),
    (4, {"lengths": (32768,)}),
    (8, {"lengths": (4096, 4096)}),
    (12, {"lengths": (2048,)}),
    (16, {"lengths": (8192,)}),
]


def same_heads(one: passes.Result, other: passes.Result, heads: list[int]) -> bool:
    return torch.equal(one.o[:, :, heads], other.o[:, :, heads]) and torch.equal(
        one.final_state[:, heads], other.final_state[:, heads]
    )


@pytest.mark.parametrize(
    ("heads", "fields"),
    [
        *FEW_HEADS,
        (6, {"lengths": (5000, 40, 3000), "packed": True}),
        (11, {"lengths": (5000, 40, 3000), "packed": True}),  # more CTAs than run at once
        (33, {"lengths": (4096,)}),
    ],
    ids=str,
)
def test_heads_do_not_depend_on_each_other(heads, fields):
    """Whether others forget changes no bit of a head, nor does another run."""
    inputs = inputs_of(heads=heads, value_heads=heads, **fields)
    if not takes(inputs):
        pytest.skip("their CTAs do not run at once here")
    alone = [run(decaying(inputs, per_head(*[decay] * heads))) for decay in (FORGETS, KEEPS)]
    for step in (1, 2, 3, 7):
        remember = list(range(0, heads, step))
        forget = [head for head in range(heads) if head % step]
        decays = [KEEPS if head in remember else FORGETS for head in range(heads)]
        both = decaying(inputs, per_head(*decays))
        for found in (run(both), run(both)):
            assert same_heads(found, alone[0], forget)
            assert same_heads(found, alone[1], remember)


@pytest.mark.parametrize(("tokens", "heads"), [(2560, 4), (8192, 16), (8192, 33)])
def test_what_follows_waits_for_all_segments(tokens, heads):
    """Segments wait for flags, which must be zero each time; what follows in a graph reads all outputs."""
    inputs = inputs_of(lengths=(tokens,), heads=heads, value_heads=heads)
    if not takes(inputs):
        pytest.skip("their CTAs do not run at once here")
    slow = decaying(inputs, per_head(*[KEEPS if head % 2 else FORGETS for head in range(heads)])).g
    fast = decaying(inputs, per_head(*[FORGETS] * heads)).g
    found = run(inputs)
    o, states = found.o, found.final_state
    copies = torch.empty_like(o), torch.empty_like(states)

    def call() -> None:
        o.fill_(float("nan"))
        states.fill_(float("nan"))
        passes.prefill(inputs, backend=JOINED, o=o, final_state=states)
        copies[0].copy_(o)
        copies[1].copy_(states)

    def check() -> None:
        wanted = run(inputs)
        assert_same_bits("o", copies[0], wanted.o)
        assert_same_bits("states", copies[1], wanted.final_state)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for gates in (fast, slow) * 5:
        inputs.g.copy_(gates)
        graph.replay()
        check()
        call()
        check()


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("decay", ["forgetting", "lasting", "half_lasting", "mixed"])
def test_gates_of_every_kind(gate, decay):
    case = Case(
        "kda", (TOKENS,), heads=HEADS, value_heads=HEADS, key_dim=128, value_dim=128, gate=gate, decay=decay,
        gate_dtype=torch.bfloat16, dtype=torch.bfloat16, qk_l2norm=True, beta_is_logit=True,
    )  # fmt: skip
    obeys_the_rule(make(case))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize(("heads", "tokens"), [(4, 1024), (8, 4096), (33, 4096), (8, 32768)])
def test_the_library_joins_segments_of_few_heads(gate, heads, tokens):
    inputs = inputs_of(heads=heads, value_heads=heads, lengths=(tokens,))
    inputs = inputs.but(case=inputs.case.but(gate=gate))
    if not takes(inputs):
        pytest.skip("their CTAs do not run at once here")
    found, joined = run(inputs, ""), run(inputs)
    assert_same_bits("o", found.o, joined.o)
    assert_same_bits("states", found.final_state, joined.final_state)
    assert not torch.equal(found.o, run(inputs, "sm90:fused").o)


def test_most_of_what_forgets_is_what_one_kernel_makes():
    """To the bit, but for some tokens at the begin of each segment: there outputs are sums of two, and chunks
    are compensated, as they are at the begin of a sequence."""
    inputs = decaying(inputs_of(lengths=(8192,)), per_head(*[BOUND * 0.99] * HEADS))
    found, whole = run(inputs), run(inputs, "sm90:fused")
    same = (found.o == whole.o).all(-1).all(-1)[0]
    assert same[:64].all()
    assert 0 < (~same).sum() <= 7 * 96  # of at most 16 segments, for which there are multiprocessors


@pytest.mark.parametrize("bits", [60, 90, 99, 101, 110, 200])
def test_gates_at_the_edge(bits):
    """Of decays to 2^-bits in the first chunk of each segment: maps vanish from 2^-100 on."""
    decays = per_head(*[-bits * math.log(2) / 64] * HEADS)
    obeys_the_rule(decaying(inputs_of(), decays))


def test_one_channel_that_remembers():
    decays = per_head(*[FORGETS] * HEADS).repeat(1, 1, 128)
    decays[:, 1, 77] = KEEPS
    found = obeys_the_rule(decaying(inputs_of(), decays))
    assert found.final_state[0, 1].abs().amax(-2).argmax() == 77


def test_a_head_that_remembers_for_a_while():
    decays = per_head(*[FORGETS] * HEADS).repeat(TOKENS, 1, 1)
    decays[1000:1500, 2] = KEEPS
    obeys_the_rule(decaying(inputs_of(), decays))


@pytest.mark.parametrize("new", [1e-6, 1e-20])
@pytest.mark.parametrize("before", [32, 64, 200, 640])
def test_large_values_before_small_ones(before, new):
    """Old values still show beside new ones, which begin so many tokens before the middle."""
    powers = 16, 32, 65, 102  # of two in a chunk of 64 tokens
    decays = per_head(*[-power / 64 * math.log(2) for power in powers])
    inputs = decaying(inputs_of(), decays)
    v = inputs.v.float()
    change = TOKENS // 2 - before
    v[:, :change] *= 1e4
    v[:, change:] *= new
    obeys_the_rule(inputs.but(v=v.to(inputs.v.dtype), initial_state=inputs.initial_state * 1e4))


@pytest.mark.parametrize(
    "fields", [{}, {"value_dim": 256}, {"lengths": (30, TOKENS - 29), "packed": True, "tail": 3}], ids=str
)
@pytest.mark.parametrize("what", ["v", "k", "g", "beta", "initial_state"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_not_forgotten(what, number, fields):
    if number == math.inf and what not in ("v", "initial_state"):
        pytest.skip("an infinite key, gate or write strength is no NaN of every kernel")
    inputs = decaying(inputs_of(**fields), per_head(*[FORGETS] * HEADS))
    clean = run(inputs)
    token = 35
    where = {"initial_state": (-1, 1, 3, 5), "g": (0, token, 1), "beta": (0, token, 1)}.get(
        what, (0, token, 1, 3)
    )
    getattr(inputs, what)[where] = number
    found, whole = run(inputs), run(inputs, "sm90:fused")
    for name, heads in (("o", 2), ("final_state", 1)):
        one, two, before = (getattr(each, name).movedim(heads, 0) for each in (found, whole, clean))
        assert torch.equal(one[1].isfinite(), two[1].isfinite()), name
        assert not one[1].isfinite().all()
        for head in (0, 2, 3):
            assert_same_bits(name, one[head], before[head])


def test_write_strengths_up_to_two():
    """A delta factor of -1 keeps the norm."""
    obeys_the_rule(decaying(inputs_of(allow_neg_eigval=True), per_head(*[-0.7] * HEADS)))


def test_write_strengths_that_are_no_logits_are_refused():
    inputs = inputs_of()
    given = inputs.but(case=inputs.case.but(beta_is_logit=False), beta=torch.full_like(inputs.beta, 2.2))
    with pytest.raises(ValueError, match="its segments take write strengths as logits"):
        run(given)


@pytest.mark.parametrize("kind", ["forget", "keep", "large before small"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lengths": (1100, 1500), "packed": True, "tail": 5},
        {"state_dtype": torch.bfloat16},
        {"lengths": (TOKENS,), "heads": 22, "value_heads": 22},
    ],
    ids=str,
)
def test_states_in_place(fields, kind):
    """Another segment must not start from what has been stored."""
    inputs = inputs_of(**{"lengths": (TOKENS, TOKENS), **fields}, pool=True)
    inputs = decaying(inputs, per_head(KEEPS if kind == "keep" else -65 * math.log(2) / 128))
    if kind == "large before small":
        v = inputs.v.float()
        v[:, : v.shape[1] // 2] *= 1e4
        v[:, v.shape[1] // 2 :] *= 1e-20
        inputs = inputs.but(v=v.to(inputs.v.dtype))
    apart = run(inputs)
    pool = inputs.initial_state.clone()
    within = passes.prefill(inputs.but(initial_state=pool), backend=JOINED, in_place=True)
    assert_same_bits("o", within.o, apart.o)
    slots = inputs.initial_state_indices.long()
    assert_same_bits("states", pool[slots[slots >= 0]], apart.final_state[slots >= 0].to(pool.dtype))


def test_checkpoints_are_left_to_other_strategies():
    inputs = inputs_of()
    states = torch.empty(1, TOKENS // 64, HEADS, 128, 128, device="cuda")
    with pytest.raises(ValueError, match="stores no states on the way"):
        passes.prefill(inputs, backend=JOINED, chunk_states=states)
