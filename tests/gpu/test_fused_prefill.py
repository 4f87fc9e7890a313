# SPDX-License-Identifier: Apache-2.0
"""Hopper's prefill by one kernel: KDA with gates that it makes itself. Chunks of 32 tokens, five or six at a
time; 64 value rows a warpgroup, in pairs of CTAs of one or in CTAs of two."""

from __future__ import annotations

import re

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, Inputs, make, strided
from cula_testing.compare import assert_same_bits, errors

FUSED = "sm90:fused"
CLOSE = 1e-2  # to the two kernels: one rounding of the operands is 2^-9
FIELDS = {
    "algorithm": "kda",
    "gate": "bounded",
    "gate_dtype": torch.bfloat16,
    "qk_l2norm": True,
    "heads": 2,
    "value_heads": 2,
    "key_dim": 128,
    "value_dim": 128,
}
# Of one sequence: parts of chunks and of the ring of stages, and more than the ring.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 160, 161, 192, 333, 1100)
SHAPES = {
    "batch": {"lengths": (97, 97, 97)},
    "packed": {"lengths": (64, 0, 31, 32, 33, 95, 1, 130), "packed": True, "tail": 20},
    "many": {"lengths": (33, 0, 7) * 20, "packed": True},
    "many of few chunks": {"lengths": (128,) * 160, "packed": True},
    "many of more chunks": {"lengths": (256, 224) * 80, "packed": True},
    "gva": {"lengths": (150,), "heads": 2, "value_heads": 8},
    "pool": {"lengths": (70, 70), "pool": True},
    "no state": {"lengths": (70,), "state": False},
    "narrow states": {"lengths": (70,), "state_dtype": torch.bfloat16},
    "states [K, V]": {"lengths": (70,), "k_first": True},
    "one projection": {"lengths": (70, 70), "fused": True},
    "scale": {"lengths": (70,), "scale": 3.0},
    "logits": {"lengths": (70,), "beta_is_logit": True, "allow_neg_eigval": True},
    "plain gates": {"lengths": (70,), "A_log": False, "dt_bias": False},
    "nearly one": {"lengths": (70,), "lower_bound": -0.01},
    **{
        f"K{K} V{V}": {"lengths": (70,), "key_dim": K, "value_dim": V}
        for K, V in ((72, 8), (96, 64), (128, 72), (120, 136), (128, 256))
    },
}

pytestmark = pytest.mark.skipif("sm90" not in device.able(torch.bfloat16), reason="sm90 does not run here")


def inputs_of(**fields) -> Inputs:
    return make(Case(**{**FIELDS, **fields}))


def fused(inputs: Inputs, backend: str = FUSED) -> passes.Result:
    return passes.prefill(inputs, backend=backend)


def ours(names: list[str], groups: int) -> bool:
    """Whether the one kernel did all, with so many state warpgroups a CTA."""
    assert names
    form = {1: "Paired", 2: "Unpaired"}[groups]
    return len(names) == 1 and re.search(rf"fused_prefill<.*::{form}, [^,]*, false>", names[0]) is not None


GATES = pytest.mark.parametrize("gate", ["bounded", "softplus"])


@GATES
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length_keeps_the_rule(tokens, gate):
    passes.assert_rule(fused, inputs_of(lengths=(tokens,), decay="mixed", gate=gate), FUSED)


@GATES
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_keeps_the_rule(shape, gate):
    if gate == "softplus" and "lower_bound" in SHAPES[shape]:
        pytest.skip("about bounded gates")
    passes.assert_rule(fused, inputs_of(**SHAPES[shape], gate=gate), FUSED)


@GATES
@pytest.mark.parametrize("decay", ["mild", "slow", "zero", "strong", "extreme", "mixed"])
@pytest.mark.parametrize("keys", ["random", "collinear"])
def test_every_decay_keeps_the_rule(decay, keys, gate):
    """At the bound, -5, a half of a chunk decays by 2^-115 and what two halves decay is no float; softplus
    gates decay by what they like."""
    passes.assert_rule(fused, inputs_of(lengths=(200,), decay=decay, keys=keys, gate=gate), FUSED)


@pytest.mark.parametrize("channels", [1, 3, 7, 64])
@pytest.mark.parametrize("raw", [9.0, 40.0, 1e5])
def test_steep_channels(channels, raw):
    """Softplus gates, chunks of 32: channels of which a first half, a second, a quarter, one token, all, or
    all of every other chunk or of every seventh decay fast, by more than there is room for as a rule:
    expected from what the warpgroup had before, or not."""
    tokens = 850
    inputs = inputs_of(lengths=(tokens,), gate="softplus")
    steep = torch.arange(channels, device="cuda") * (128 // channels) + 1
    at = torch.arange(tokens, device="cuda")
    chunk, token = at // 32, at % 32
    for which in (
        token < 16,
        token >= 16,
        token // 8 == 1,
        token == 13,
        token == 31,
        token >= 0,
        chunk % 2 == 1,
        chunk % 7 == 6,
    ):
        g = torch.full_like(inputs.g, -4.0)
        g[:, which.nonzero()[:, 0, None], :, steep] = raw
        passes.assert_rule(fused, inputs.but(g=g), FUSED)


def test_steep_channels_come_and_go():
    """Each pair of channels now and then: of some the numbers are as they came, of others they come again."""
    inputs = inputs_of(lengths=(1500,), gate="softplus")
    draw = torch.Generator("cuda").manual_seed(1)
    often = torch.rand(47, 128, device="cuda", generator=draw) < 0.05
    g = torch.where(often.repeat_interleave(32, 0)[:1500], 9.0, -4.0).to(inputs.g)
    passes.assert_rule(fused, inputs.but(g=g[None, :, None].expand_as(inputs.g).contiguous()), FUSED)


@pytest.mark.parametrize("channels", [1, 64, 127])
def test_decays_that_change(channels):
    """Channels that decay at the bound for some tokens and hardly for others, chunk by chunk and within
    chunks."""
    inputs = inputs_of(lengths=(320,), A_log=False, dt_bias=False)
    token, period = torch.arange(320, device="cuda"), torch.tensor([16, 32, 48, 5, 24], device="cuda")
    for every in period.tolist():
        g = torch.full_like(inputs.g, -9.0)
        g[:, (token // every) % 2 == 0, :, :channels] = 20.0
        passes.assert_rule(fused, inputs.but(g=g), FUSED)


@pytest.mark.parametrize("raw", [70.0, 85.0, 110.0, float("inf")])
def test_small_values_before_a_fast_decay(raw):
    """One token of each half decays by nearly as much as operands have room for, or by more; those before it
    not at all."""
    inputs = inputs_of(lengths=(130,), gate="softplus", A_log=False, dt_bias=False)
    g = torch.full_like(inputs.g, -9.0)
    g[:, torch.arange(130, device="cuda") % 16 == 15] = raw
    for size in (1.0, 1e-5):
        small = inputs.but(g=g, v=inputs.v * size, initial_state=inputs.initial_state * size)
        passes.assert_rule(fused, small, FUSED)


# Nearly as many heads as multiprocessors: a CTA each, where two would take twice the rounds.
WIDE = {
    "batch": {"lengths": (100,)},
    "packed": {"lengths": (0, 45, 1, 70), "packed": True, "tail": 3},
    "V72": {"lengths": (70,), "value_dim": 72},
}


@pytest.mark.parametrize("shape", WIDE)
def test_two_warpgroups_a_cta_change_no_bit(shape):
    all_of_them = torch.cuda.get_device_properties("cuda").multi_processor_count
    heads = all_of_them * 7 // 8 // len(WIDE[shape]["lengths"])
    inputs = make(Case(**{**FIELDS, **WIDE[shape], "heads": heads, "value_heads": heads}), draw_on="cuda")
    found = {}
    assert ours(device.kernels_of(lambda: found.update(whole=fused(inputs))), groups=2)
    few = 8
    assert ours(device.kernels_of(lambda: found.update(alone=fused(inputs.first_heads(few)))), groups=1)
    assert_same_bits("o", found["alone"].o, found["whole"].o[:, :, :few].contiguous())
    assert_same_bits(
        "final_state", found["alone"].final_state, found["whole"].final_state[:, :few].contiguous()
    )


def test_more_values_than_a_kernel_takes():
    inputs = inputs_of(lengths=(70,), value_dim=320)
    whole, first = (
        fused(inputs),
        fused(
            inputs.but(
                case=inputs.case.but(value_dim=256),
                v=inputs.v[..., :256],
                initial_state=inputs.initial_state[:, :, :256],
            )
        ),
    )
    assert_same_bits("o", first.o, whole.o[..., :256].contiguous())
    passes.assert_rule(fused, inputs, FUSED)


def test_a_batch_is_as_each_of_its_sequences():
    """And where the call is to be batch-invariant, so does `sm90` choose."""
    inputs = make(
        Case(**{**FIELDS, "lengths": (100, 33, 7, 64), "packed": True, "heads": 8, "value_heads": 64})
    )

    def call(inputs: Inputs) -> passes.Result:
        return passes.prefill(inputs, backend="sm90", batch_invariant=True)

    whole, begin = call(inputs), 0
    for n, length in enumerate(inputs.case.lengths):
        tensors = {
            name: getattr(inputs, name)[:, begin : begin + length] for name in ("q", "k", "v", "g", "beta")
        }
        case = inputs.case.but(lengths=(length,), packed=False)
        alone = call(
            inputs.but(case=case, cu_seqlens=None, initial_state=inputs.initial_state[n : n + 1], **tensors)
        )
        assert_same_bits("o", alone.o, whole.o[:, begin : begin + length].contiguous())
        assert_same_bits("final_state", alone.final_state[0], whole.final_state[n])
        begin += length


def test_states_stay_where_they_are():
    inputs = inputs_of(lengths=(70, 70))
    dense = fused(inputs)
    states = inputs.initial_state.clone()
    in_place = passes.prefill(inputs.but(initial_state=states), backend=FUSED, in_place=True)
    assert_same_bits("o", dense.o, in_place.o)
    assert_same_bits("final_state", dense.final_state, states)
    only = inputs.but(has_initial_state=torch.tensor([True, False], device="cuda"))
    passes.assert_rule(fused, only, FUSED)


def test_large_values_at_the_bound():
    """The state is counted from where it is larger than what is written to it, by up to 2^107."""
    inputs = inputs_of(lengths=(130,), decay="extreme")
    passes.assert_rule(fused, inputs.but(v=inputs.v * 1e4, initial_state=inputs.initial_state * 1e4), FUSED)


def test_steep_channels_of_large_queries():
    """Scale and decays together reach what bfloat16 holds."""
    inputs = inputs_of(lengths=(70,), gate="softplus", scale=256.0, A_log=False, dt_bias=False)
    q = torch.zeros_like(inputs.q)
    q[..., 1] = 1.0
    passes.assert_rule(fused, inputs.but(q=q, g=torch.full_like(inputs.g, 1000.0)), FUSED)


@pytest.mark.parametrize("bias", [float("inf"), 3e38, float("-inf")])
def test_biases_without_bound(bias):
    inputs = inputs_of(lengths=(70,), gate="softplus")
    dt_bias = inputs.dt_bias.clone()
    dt_bias[:, 3] = bias
    passes.assert_rule(fused, inputs.but(dt_bias=dt_bias), FUSED)


@GATES
@pytest.mark.parametrize("decay", ["mild", "extreme", "mixed"])
@pytest.mark.parametrize("value_dim", [64, 128])
def test_what_is_kept_on_the_way_changes_no_bit(decay, gate, value_dim):
    """And is what a shorter call ends with. Of 64 value rows one of a pair has none, and is ahead."""
    inputs = inputs_of(lengths=(333,), decay=decay, gate=gate, value_dim=value_dim)
    plain = fused(inputs)
    room = passes.empty_states(inputs, 6).unflatten(0, (1, 6))
    kept = passes.prefill(inputs, backend=FUSED, chunk_states=room)
    assert_same_bits("o", plain.o, kept.o)
    assert_same_bits("final_state", plain.final_state, kept.final_state)
    plan = torch.tensor([[0, 64, 1], [0, 256, 0], [0, 128, 2]], dtype=torch.int32, device="cuda")
    some = passes.prefill(
        inputs, backend=FUSED, checkpoints=passes.empty_states(inputs, 3), checkpoint_plan=plan
    )
    assert_same_bits("o", plain.o, some.o)
    for slot, chunk in ((1, 1), (0, 4), (2, 2)):
        assert_same_bits("checkpoints", some.checkpoints[slot], kept.chunk_states[0, chunk])
    for chunk in range(1, 6):
        shorter = fused(inputs.tokens(0, 64 * chunk))
        assert_same_bits("chunk_states", shorter.final_state[0], kept.chunk_states[0, chunk])


@GATES
def test_short_calls_are_fused(gate):
    inputs = inputs_of(lengths=(128,), gate=gate)
    assert ours(device.kernels_of(lambda: passes.prefill(inputs, backend="sm90")), groups=1)


def test_many_heads_of_long_sequences_are_fused():
    inputs = make(Case(**{**FIELDS, "lengths": (512,) * 4, "heads": 66, "value_heads": 66}), draw_on="cuda")
    assert ours(device.kernels_of(lambda: passes.prefill(inputs, backend="sm90")), groups=2)
    by_two = inputs.but(g=strided(inputs.g, 3))  # not in whole pieces
    assert not ours(device.kernels_of(lambda: passes.prefill(by_two, backend="sm90")), groups=2)
    one, two = passes.prefill(inputs, backend="sm90"), passes.prefill(by_two, backend="sm90")
    for name in ("o", "final_state"):
        assert errors(getattr(one, name), getattr(two, name).double()).rms < CLOSE, name


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gate": "log_decay"}, "softplus gates"),
        ({"lower_bound": -6.0}, "lower_bound"),
        ({"qk_l2norm": False}, "qk_l2norm"),
        ({"scale": 1e3}, "scale"),
        ({"gate_dtype": torch.float32}, "must be bfloat16"),
        ({"key_dim": 64}, "K above 64"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"value_dim": 100}, "whole pieces"),
    ],
)
def test_what_it_declines(fields, sentence):
    with pytest.raises(ValueError, match=f"does not take this call(.|\n)*{sentence}"):
        fused(inputs_of(lengths=(40,), **fields))
