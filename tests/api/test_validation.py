# SPDX-License-Identifier: Apache-2.0
"""Every argument of the ops, wrong in every way: the sentence that says so, and nothing written."""

from __future__ import annotations

import re

import pytest
import torch

from cula_testing import device, operators
from cula_testing.arguments import BASE, HV, PACKED, B, H, K, T, V, arguments, i32, pooled, refused
from cula_testing.cases import state_like
from cula_testing.compare import assert_same_bits

NAN = float("nan")
ALONE = {"initial_state": None, "initial_state_indices": None}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def states(*shape: int) -> torch.Tensor:
    return torch.full(shape, NAN)


# (pass, case, what is wrong, the sentence after "pass: ")
ROWS = [
    # q, k, v
    ("prefill", BASE, {"q": bf16(2, 8, 32)}, "q must have shape [B, T, H, K], got [2, 8, 32]"),
    ("prefill", BASE, {"k": bf16(B, T, H, 15)},
     "k must have shape [B, T, H, K] = [2, 8, 2, 16], got [2, 8, 2, 15]"),
    ("prefill", BASE, {"k": bf16(B, 7, H, K)},
     "k must have shape [B, T, H, K] = [2, 8, 2, 16], got [2, 7, 2, 16]"),
    ("decode", BASE, {"v": bf16(1, T, HV, V)},
     "v must have shape [B, T, HV, V] = [2, 8, HV, V], got [1, 8, 4, 24]"),
    ("decode", BASE, {"v": bf16(B, T, 3, V)},
     "v must have a number of heads that is a multiple of q's 2, got 3"),
    ("verify", BASE, {"v": bf16(B, T, 0, V)},
     "v must have a number of heads that is a multiple of q's 2, got 0"),
    ("prefill", BASE, {"q": bf16(B, T, 0, K), "k": bf16(B, T, 0, K)},
     "q must have at least one head, got [2, 8, 0, 16]"),
    ("prefill", BASE, {"q": bf16(B, T, H, 257), "k": bf16(B, T, H, 257)},
     "q must have a key dimension K from 1 to 256, got 257"),
    ("prefill", BASE, {"q": bf16(B, T, H, 0), "k": bf16(B, T, H, 0)},
     "q must have a key dimension K from 1 to 256, got 0"),
    ("segment", BASE, {"v": bf16(B, T, HV, 0)}, "v must have a value dimension V of at least 1, got 0"),
    ("prefill", BASE, {"q": torch.zeros(B, T, H, K, dtype=torch.int32)},
     "q must have a floating-point dtype, got int32"),
    ("prefill", BASE, {"k": torch.zeros(B, T, H, K)}, "k must have dtype bfloat16, got float32"),
    ("prefill", BASE, {"v": torch.zeros(B, T, HV, V).half()}, "v must have dtype bfloat16, got float16"),
    # o and plain numbers
    ("prefill", BASE, {"o": bf16(B, T, HV, V + 1)},
     "o must have shape [B, T, HV, V] = [2, 8, 4, 24], got [2, 8, 4, 25]"),
    ("prefill", BASE, {"o": bf16(B, T, HV, V).half()}, "o must have dtype bfloat16, got float16"),
    ("prefill", BASE, {"o": bf16(B, T, V, HV).mT},
     "o must be contiguous in its last dimension, got stride 4"),
    ("decode", BASE, {"o": bf16(B, T, 1, V).expand(B, T, HV, V)},
     "o must not overlap itself in memory, got strides that make elements share an address"),
    ("prefill", BASE, {"scale": NAN}, "scale must be a finite float32 number, got nan"),
    ("prefill", BASE, {"chunk_tokens": 48}, "chunk_size must be 16, 32 or 64, got 48"),
    # gate
    ("prefill", BASE, {"g": None}, "g must be given for kda, got none"),
    ("prefill", BASE, {"g": torch.zeros(B, T, HV)},
     "g must have shape [B, T, HV, K] = [2, 8, 4, 16], got [2, 8, 4]"),
    ("prefill", BASE, {"g": torch.zeros(B, T, H, K)},
     "g must have shape [B, T, HV, K] = [2, 8, 4, 16], got [2, 8, 2, 16]"),
    ("prefill", BASE, {"g": torch.zeros(B, T, HV, K).long()},
     "g must have a floating-point dtype, got int64"),
    ("prefill", BASE.but(algorithm="gdn"), {"g": None}, "g must be given for gdn, got none"),
    ("prefill", BASE.but(algorithm="gdn"), {"g": torch.zeros(B, T, HV, K)},
     "g must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 4, 16]"),
    ("prefill", BASE.but(algorithm="lightning"), {"g": torch.zeros(B, T, HV)},
     "g must be left out for lightning, which has no decay per token, got [2, 8, 4]"),
    ("prefill", BASE.but(algorithm="lightning"), {"decay": None},
     "decay must be given for lightning, got none"),
    ("prefill", BASE, {"decay": torch.zeros(HV)}, "decay must be left out for kda, got [4]"),
    ("prefill", BASE.but(algorithm="lightning"), {"decay": torch.zeros(H)},
     "decay must have shape [HV] = [4], got [2]"),
    ("prefill", BASE, {"A_log": torch.zeros(HV)}, "A_log must be left out when g is the log decay, got [4]"),
    ("prefill", BASE, {"dt_bias": torch.zeros(HV, K)},
     "dt_bias must be left out when g is the log decay, got [4, 16]"),
    ("prefill", BASE.but(algorithm="lightning"), {"gate": "softplus"},
     "use_gate_in_kernel must be left out for lightning, got true"),
    ("prefill", BASE.but(gate="softplus"), {"A_log": torch.zeros(H)},
     "A_log must have shape [HV] = [4], got [2]"),
    ("prefill", BASE.but(gate="softplus"), {"dt_bias": torch.zeros(HV)},
     "dt_bias must have shape [HV, K] = [4, 16], got [4]"),
    ("prefill", BASE.but(algorithm="gdn", gate="softplus"), {"dt_bias": torch.zeros(HV, K)},
     "dt_bias must have shape [HV] = [4], got [64]"),
    ("prefill", BASE.but(gate="bounded"), {"lower_bound": 0.0}, "lower_bound must be negative, got 0.000000"),
    ("prefill", BASE.but(gate="bounded"), {"lower_bound": 5.0}, "lower_bound must be negative, got 5.000000"),
    ("prefill", BASE.but(gate="bounded"), {"lower_bound": NAN}, "lower_bound must be negative, got nan"),
    # beta
    ("prefill", BASE, {"beta": None}, "beta must be given for kda, got none"),
    ("prefill", BASE, {"beta": torch.zeros(B, T, H)},
     "beta must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 2]"),
    ("prefill", BASE, {"beta": torch.zeros(B, T, HV, K)},
     "beta must have shape [B, T, HV, V] = [2, 8, 4, 24], got [2, 8, 4, 16]"),
    ("prefill", BASE, {"beta": torch.zeros(B, T, HV).int()},
     "beta must have a floating-point dtype, got int32"),
    ("prefill", BASE.but(algorithm="gla"), {"beta": torch.zeros(B, T, HV)},
     "beta must be left out for gla, got [2, 8, 4]"),
    ("prefill", BASE.but(algorithm="gla"), {"beta_is_logit": True},
     "use_beta_sigmoid_in_kernel must be left out for gla, got true"),
    ("prefill", BASE, {"allow_neg_eigval": True},
     "allow_neg_eigval must come with use_beta_sigmoid_in_kernel: it doubles the sigmoid, "
     "got true without it"),
    # cu_seqlens
    ("prefill", BASE, {"cu_seqlens": i32(0, 5, 8)},
     "q must have batch size 1 with cu_seqlens (pack the sequences along T), got 2"),
    ("prefill", PACKED, {"cu_seqlens": i32(0, 5, 8)[None]}, "cu_seqlens must have shape [N + 1], got [1, 3]"),
    ("prefill", PACKED, {"cu_seqlens": i32(0, 5, 8).float()},
     "cu_seqlens must have dtype int32 or int64, got float32"),
    ("prefill", PACKED, {"cu_seqlens": i32()}, "cu_seqlens must have N + 1 >= 1 elements, got 0"),
    ("prefill", PACKED, {"cu_seqlens": i32(1, 5, 8)}, "cu_seqlens must start at 0, got cu_seqlens[0] = 1"),
    ("decode", PACKED, {"cu_seqlens": i32(-1, 5, 8)}, "cu_seqlens must start at 0, got cu_seqlens[0] = -1"),
    ("decode", PACKED, {"cu_seqlens": i32(0, 5, 4)},
     "cu_seqlens must not decrease, got cu_seqlens[2] = 4 after 5"),
    ("verify", PACKED, {"cu_seqlens": i32(0, 5, -(2**31))},
     "cu_seqlens must not decrease, got cu_seqlens[2] = -2147483648 after 5"),
    ("segment", PACKED, {"cu_seqlens": i32(0, 5, 9)},
     "cu_seqlens must end within the 8 tokens of q, got cu_seqlens[2] = 9"),
    ("prefill", PACKED, {"cu_seqlens": torch.tensor([0, 5, 2**40])},
     "cu_seqlens must end within the 8 tokens of q, got cu_seqlens[2] = 1099511627776"),
    # states
    ("prefill", BASE, {"initial_state": states(B, HV, K, V)},
     "initial_state must have shape [N, HV, V, K] = [2, 4, 24, 16], got [2, 4, 16, 24]"),
    ("prefill", BASE, {"initial_state": states(3, HV, V, K)},
     "initial_state must have shape [N, HV, V, K] = [2, 4, 24, 16], got [3, 4, 24, 16]"),
    ("prefill", PACKED, {"final_state": states(3, HV, V, K)},
     "final_state must have shape [N, HV, V, K] = [2, 4, 24, 16], got [3, 4, 24, 16]"),
    ("decode", BASE, {"initial_state": states(B, HV, V, K).double()},
     "initial_state must have dtype float32 or bfloat16 or float16 or float8_e4m3fn, got float64"),
    ("decode", BASE, {"final_state": states(B, HV, V, K).double()},
     "final_state must have dtype float32 or bfloat16 or float16 or float8_e4m3fn, got float64"),
    ("decode", BASE, {"initial_state": states(B, HV, V, 2 * K)[..., ::2]},
     "initial_state must be contiguous along K or along V, got strides 32, 2"),
    ("decode", BASE, {"final_state": states(1, HV, V, K).expand(B, HV, V, K)},
     "final_state must not overlap itself in memory, got strides that make elements share an address"),
    ("prefill", BASE, {**ALONE, "final_state": None, "initial_state_indices": i32(0, 1)},
     "initial_state_indices must come with a state, got indices alone"),
    ("prefill", BASE, {"final_state": None, "final_state_indices": i32(0, 1)},
     "final_state_indices must come with a state to write, got indices alone"),
    ("prefill", BASE, pooled(initial_state_indices=i32(1, 4, 2)),
     "initial_state_indices must have shape [N] = [2], got [3]"),
    ("prefill", BASE, pooled(initial_state_indices=i32(1, 4).float()),
     "initial_state_indices must have dtype int32 or int64, got float32"),
    ("prefill", BASE, pooled(initial_state_indices=i32(1, 6)),
     "initial_state_indices must stay below the 6 slots of the pool, got 6 for sequence 1"),
    ("decode", BASE, pooled(initial_state_indices=i32(2**31 - 1, 0)),
     "initial_state_indices must stay below the 6 slots of the pool, got 2147483647 for sequence 0"),
    ("decode", BASE, pooled(initial_state_indices=i32(3, 3)),
     "initial_state_indices must name each slot that is written once, got slot 3 for sequences 0 and 1"),
    ("decode", BASE, pooled(final_state_indices=i32(3, 3)),
     "final_state_indices must name each slot that is written once, got slot 3 for sequences 0 and 1"),
    ("decode", BASE, pooled(final_state_indices=i32(0, 6)),
     "final_state_indices must stay below the 6 slots of the pool, got 6 for sequence 1"),
    ("prefill", BASE, {"has_initial_state": torch.ones(3, dtype=torch.bool)},
     "has_initial_state must have shape [N] = [2], got [3]"),
    ("prefill", BASE, {"has_initial_state": i32(1, 1)}, "has_initial_state must have dtype bool, got int32"),
    ("prefill", BASE, {**ALONE, "has_initial_state": torch.ones(2, dtype=torch.bool)},
     "has_initial_state must come with an initial state, got the mask alone"),
    # checkpoints and chunk states
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K)},
     "checkpoints must be given as states and plan together, got one of them"),
    ("prefill", BASE, {"checkpoints": states(1, HV, K, V), "checkpoint_plan": i32([0, 8, 0])},
     "checkpoints.states must have shape [slots, HV, V, K] = [slots, 4, 24, 16], got [1, 4, 16, 24]"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([0, 8])},
     "checkpoints.plan must have shape [M, 3], got [1, 2]"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([0, 8, 0]).float()},
     "checkpoints.plan must have dtype int32 or int64, got float32"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([2, 8, 0])},
     "checkpoints.plan must name a sequence below 2, got 2 in row 0"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([-1, 8, 0])},
     "checkpoints.plan must name a sequence below 2, got -1 in row 0"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([0, 7, 0])},
     "checkpoints.plan must name a multiple of 64 tokens within the sequence, or its length 8, "
     "got 7 in row 0"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([0, 64, 0])},
     "checkpoints.plan must name a multiple of 64 tokens within the sequence, or its length 8, "
     "got 64 in row 0"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([0, 8, -1], [0, 8, 1])},
     "checkpoints.plan must name a slot below 1, got 1 in row 1"),
    ("prefill", BASE, {"checkpoints": states(1, HV, V, K), "checkpoint_plan": i32([0, 8, 0], [1, 8, 0])},
     "checkpoints.plan must name each slot once, got slot 0 twice"),
    ("prefill", BASE, {"chunk_states": states(B, HV, V, K)},
     "chunk_states must have shape [B, NT, HV, V, K] = [2, NT, 4, 24, 16], got [2, 4, 24, 16]"),
    ("prefill", PACKED, {"chunk_states": states(1, 1, HV, V, K)},
     "chunk_states must have room for 2 chunks, got 1"),
    ("prefill", BASE, {"chunk_states": states(B, 1, 1, V, K).expand(B, 1, HV, V, K)},
     "chunk_states must not overlap itself in memory, got strides that make elements share an address"),
    # verify
    ("verify", BASE, pooled(initial_state_indices=None, state_indices=torch.arange(16.0).view(2, 8)),
     "state_indices must have dtype int32 or int64, got float32"),
    ("verify", BASE, pooled(initial_state_indices=None, state_indices=i32(0, 1)),
     "state_indices must have shape [N, S] = [2, S], got [2]"),
    ("verify", BASE, pooled(initial_state_indices=None, state_indices=i32([0, 1], [2, 3])),
     "state_indices must have room for the longest row's 8 tokens, got 2"),
    ("verify", BASE, {**ALONE, "state_indices": torch.arange(16, dtype=torch.int32).view(2, 8)},
     "state_indices must come with a state pool, got indices alone"),
    ("verify", BASE,
     pooled(initial_state_indices=None, state_indices=torch.arange(16, dtype=torch.int32).view(2, 8)),
     "state_indices must stay below the 6 slots of the pool, got 6 for sequence 0"),
    ("verify", BASE, {"num_accepted": i32(1, 1)}, "state_indices must be given with num_accepted, got none"),
    ("verify", BASE, {"snapshots": states(B, T - 1, HV, V, K)},
     "snapshots must have room for the longest row's 8 tokens, got 7"),
    ("verify", BASE, {"snapshots": states(1, T, HV, V, K)},
     "snapshots must have a slot for each of 2 rows, got 1"),
    ("verify", BASE, {"snapshots": states(B, T, HV, K, V)},
     "snapshots must have shape [slots, S, HV, V, K] = [slots, S, 4, 24, 16], got [2, 8, 4, 16, 24]"),
    ("verify", BASE, {"snapshot_indices": i32(0, 1)},
     "snapshot_indices must come with snapshots, got indices alone"),
    ("verify", BASE, {"snapshots": states(B, T, HV, V, K), "snapshot_indices": i32(0, 2)},
     "snapshot_indices must stay below the 2 slots of the pool, got 2 for sequence 1"),
    ("verify", BASE, {"snapshots": states(B, T, HV, V, K), "snapshot_indices": i32(1, 1)},
     "snapshot_indices must name each slot that is written once, got slot 1 for sequences 0 and 1"),
    ("verify", BASE, {"parents": i32([-1] * 8, [0] * 8)},
     "parents must name an earlier token of the row, got 0 for token 0 of row 1"),
    ("verify", BASE, {"parents": i32([-1] * 7, [-1] * 7)},
     "parents must have room for the longest row's 8 tokens, got 7"),
    ("verify", BASE, {"parents": i32([-1] * 8, [-1] * 8), "final_state": states(B, HV, V, K)},
     "final_state must be left out with parents (a tree has no last state), or be indexed per token by "
     "state_indices, got a state"),
    # segment
    ("segment", BASE, {"m": states(B, HV, K)},
     "m must have shape [N, HV, K, K] = [2, 4, 16, 16], got [2, 4, 16]"),
    ("segment", BASE.but(algorithm="gla"), {},
     "m must have shape [N, HV, K] = [2, 4, 16], got [2, 4, 16, 16]"),
    ("segment", BASE, {"b": states(B, HV, K, V)},
     "b must have shape [N, HV, V, K] = [2, 4, 24, 16], got [2, 4, 16, 24]"),
    ("segment", BASE, {"m": states(B, HV, K, K).bfloat16()}, "m must have dtype float32, got bfloat16"),
    ("segment", BASE, {"b": states(1, HV, V, K).expand(B, HV, V, K)},
     "b must not overlap itself in memory, got strides that make elements share an address"),
]  # fmt: skip


# What lies in the memory of cu_seqlens, of indices and of plans. A GPU call would have to wait for it, so it
# is checked only with device.DEBUG_CHECKS; without it the kernels stay within bounds
# (tests/gpu/test_malformed_values.py).
VALUES = re.compile(
    r"cu_seqlens must (start|not decrease|end)|must stay below|must name|must not let|num_accepted must lie"
    r"|room for \d+ chunks"
)


def skip_if_unread(sentence: str) -> None:
    if VALUES.search(sentence) and not device.values_are_read():
        pytest.skip(f"a value on the GPU: checked with {device.DEBUG_CHECKS}=1")


@pytest.mark.parametrize(("pass_name", "case", "wrong", "sentence"), ROWS, ids=[row[3] for row in ROWS])
def test_wrong(pass_name, case, wrong, sentence):
    skip_if_unread(sentence)
    assert refused(pass_name, {**arguments(pass_name, case), **wrong}) == f"{pass_name}: {sentence}"


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify", "segment"])
def test_right(pass_name):
    """The arguments that the rows above break are right: what they raise is about what they break."""
    for case in (BASE, PACKED):
        named = arguments(pass_name, case)
        operators.call(pass_name, **named)
        assert (named["m"] if pass_name == "segment" else named["o"]).isfinite().all()


def test_num_accepted_out_of_range():
    skip_if_unread("num_accepted must lie")
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    pool = {"initial_state": None, "final_state": state_like(BASE, 16, fill=0.0), "in_place": True}
    for count in (0, 9, -1):
        more = {**pool, "state_indices": table, "num_accepted": i32(1, count)}
        sentence = refused("verify", {**arguments("verify"), **more})
        assert sentence == f"verify: num_accepted must lie in 1..8, got {count} for sequence 1"


# What the binding refuses before the core sees it.


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify", "segment"])
@pytest.mark.parametrize(("option", "value"), [("algorithm", "mamba"), ("gate", "tanh"), ("backend", "tpu")])
def test_unknown_names(pass_name, option, value):
    sentence = refused(pass_name, {**arguments(pass_name), option: value})
    assert option in sentence
    assert f'"{value}"' in sentence, "it says what was given"
    known = {"algorithm": "kda", "gate": "softplus", "backend": "reference"}[option]
    assert known in sentence, "it says what there is"


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta", "initial_state"])
def test_a_dtype_that_the_library_does_not_know(argument):
    named = arguments("prefill")
    named[argument] = named[argument].to(torch.complex64)
    assert refused("prefill", named) == (
        f"prefill: {argument} must be a tensor of floats, int32, int64 or bool, got ComplexFloat"
    )


@pytest.mark.parametrize("argument", ["q", "initial_state"])
def test_too_many_dimensions(argument):
    named = arguments("prefill")
    named[argument] = named[argument][None, None, None]
    assert re.search(rf"\b{argument}\b", refused("prefill", named))


def test_in_place_needs_a_state():
    named = {**arguments("prefill"), **ALONE, "final_state": None, "in_place": True}
    assert "final_state" in refused("prefill", named)


def test_in_place_has_one_state():
    """in_place says that final_state is the initial state too: a second one would be ignored."""
    assert "initial_state" in refused("prefill", {**arguments("prefill"), "in_place": True})


# Forcing a backend.


def test_forced_backend_that_lacks_the_dtype_says_why():
    """The fast targets take no float64; the sentence is theirs."""
    named = arguments("prefill")
    for name in ("q", "k", "v", "o"):
        named[name] = named[name].double()
    family, *_, last = device.family(), *device.targets()
    sentence = refused("prefill", {**named, "backend": family})
    assert sentence.startswith(f'prefill: backend "{family}" does not take this call:\n')
    assert f"{last}: " in sentence
    assert "float64" in sentence


def test_a_prefix_names_a_family():
    named = arguments("prefill")
    operators.call("prefill", **{**named, "backend": device.family()})
    one = named["o"].clone()
    operators.call("prefill", **{**named, "backend": ""})
    assert_same_bits("o", one, named["o"])


def test_half_a_name_is_no_name():
    assert "backend must be one of" in refused("prefill", {**arguments("prefill"), "backend": "cp"})
