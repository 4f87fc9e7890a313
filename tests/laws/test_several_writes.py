# SPDX-License-Identifier: Apache-2.0
"""Tokens that write several times: the laws that tie them to tokens that write once."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing import gradients, level1, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_accurate, assert_exact, assert_same_bits

ONE_WRITE = {"gdp": "gdn", "delta_product": "delta"}
CALLS = {name: getattr(passes, name) for name in ("prefill", "decode", "verify", "segment")}
COUNTS = (2, 3, 4, 8, 16, 64, 65, 150)

pytestmark = pytest.mark.parametrize("name", ONE_WRITE)


def differentiate(inputs: Inputs, *, backend: str) -> gradients.Gradients:
    return gradients.backward(inputs, *gradients.upstream(inputs), backend=backend)


def skip_if_declined(call, inputs: Inputs, target: str) -> None:
    """Some targets of a GPU take counts that divide 16 alone, or have no kernel for the pass."""
    passes.skip_if_declined(lambda given, backend: call(given, backend=backend), inputs, target)


def by_write(x: torch.Tensor, writes: int, at: int) -> torch.Tensor:
    """What tokens have, in one row for each write: row `at` of a token has it, and the others zeros."""
    rows = x.new_zeros((*x.shape[:2], writes, *x.shape[2:]))
    rows[:, :, at] = x
    return rows.flatten(1, 2)


def timeline(inputs: Inputs) -> Inputs:
    """The call in which each write is a token: the first of a token decays, and the last reads."""
    case, n = inputs.case, inputs.case.writes
    lengths = tuple(length * n for length in case.lengths)
    return inputs.but(
        case=case.but(algorithm=ONE_WRITE[case.algorithm], lengths=lengths),
        q=by_write(inputs.q, n, -1),
        g=None if inputs.g is None else by_write(inputs.g, n, 0),
        cu_seqlens=None if inputs.cu_seqlens is None else inputs.cu_seqlens * n,
    )


def exact_and_naive(call, inputs: Inputs) -> tuple[passes.Result, passes.Result]:
    return call(inputs.double(), backend="reference"), call(inputs, backend="reference:naive")


@pytest.mark.parametrize("call", CALLS)
def test_one_write_is_the_delta_rule(target, name, call):
    inputs = make(Case(name, (70, 0, 9), packed=True, value_heads=4, householders=1, state=call != "segment"))
    skip_if_declined(CALLS[call], inputs, target)
    other = inputs.but(case=inputs.case.but(algorithm=ONE_WRITE[name]))
    one, two = (CALLS[call](each, backend=target) for each in (inputs, other))
    for what, x in one.items():
        assert_same_bits(what, x, getattr(two, what))


def test_gradients_of_one_write_are_those_of_the_delta_rule(target, name):
    inputs = make(Case(name, (70, 0, 9), packed=True, value_heads=4, householders=1))
    skip_if_declined(differentiate, inputs, target)
    other = inputs.but(case=inputs.case.but(algorithm=ONE_WRITE[name]))
    one, two = (differentiate(each, backend=target) for each in (inputs, other))
    assert one.keys() == two.keys()
    for what, x in one.items():
        assert_same_bits(f"d_{what}", x, two[what])


def several(name: str, writes: int, packed: bool = True, **more) -> Inputs:
    """Tokens of up to three chunks of writes, and sequences that begin and end within a chunk."""
    tokens = max(3, 130 // writes)
    sizes = {"lengths": (tokens, 0, 2, 7), "tail": 1} if packed else {"lengths": (tokens,) * 2}
    return make(Case(name, packed=packed, value_heads=4, householders=writes, **sizes, **more))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch"])
@pytest.mark.parametrize("writes", COUNTS)
def test_a_write_is_a_token_that_does_not_decay_or_read(target, name, writes, packed):
    inputs = several(name, writes, packed)
    skip_if_declined(passes.prefill, inputs, target)
    found = passes.prefill(inputs, backend=target)
    rows = timeline(inputs)
    exact, naive = exact_and_naive(passes.prefill, rows)
    last = slice(writes - 1, None, writes)
    assert_accurate("o", found.o, exact.o[:, last], naive.o[:, last], inputs.q.dtype)
    assert_accurate("final_state", found.final_state, exact.final_state, naive.final_state, inputs.q.dtype)


@pytest.mark.parametrize("writes", COUNTS)
def test_gradients_are_those_of_such_tokens(target, name, writes):
    inputs = several(name, writes)
    skip_if_declined(differentiate, inputs, target)
    d_o, d_final = gradients.upstream(inputs)
    found = gradients.backward(inputs, d_o, d_final, backend=target)
    rows, of_rows = timeline(inputs), (by_write(d_o, writes, -1), d_final)
    exact = gradients.exact(rows, *of_rows)
    naive = gradients.backward(rows, *of_rows, backend="reference:naive")
    own = {"q": slice(writes - 1, None, writes), "g": slice(0, None, writes)}
    for each in (exact, naive):
        each |= {what: each[what][:, part] for what, part in own.items() if what in each}
    gradients.assert_near(inputs, found, exact, naive)


@pytest.mark.parametrize("writes", [2, 3, 16, 65])
def test_the_map_is_that_of_such_tokens(target, name, writes):
    inputs = several(name, writes, state=False)
    skip_if_declined(passes.segment, inputs, target)
    found = passes.segment(inputs, backend=target)
    rows = timeline(inputs)
    exact, naive = exact_and_naive(passes.segment, rows)
    assert_accurate("b", found.b, exact.b, naive.b, inputs.q.dtype)
    assert_accurate("m", found.m, exact.m, naive.m, inputs.q.dtype, torch.eye(found.m.shape[-1]))


@pytest.mark.parametrize("writes", [2, 3, 4])
def test_drafts_are_such_tokens(target, name, writes):
    """Of a chain, its states are those after a token's last write."""
    inputs = make(Case(name, (4,) * 3, value_heads=4, householders=writes))
    skip_if_declined(passes.verify, inputs, target)
    room = passes.empty_states(inputs, 12).unflatten(0, (3, 4))
    found = passes.verify(inputs, backend=target, snapshots=room)
    rows, last = timeline(inputs), slice(writes - 1, None, writes)
    results = []
    for each, backend in ((rows.double(), "reference"), (rows, "reference:naive")):
        kept = passes.empty_states(each, 12 * writes).unflatten(0, (3, 4 * writes))
        results.append(passes.verify(each, backend=backend, snapshots=kept))
    assert_accurate("o", found.o, *(x.o[:, last] for x in results), inputs.q.dtype)
    assert_accurate("snapshots", found.snapshots, *(x.snapshots[:, last] for x in results), inputs.q.dtype)


@pytest.mark.parametrize("key_dim", [64, 128])
def test_drafts_in_slots_of_a_table(target, name, key_dim):
    """The last draft of a sequence has no slot, one starts from its second slot, and one is null."""
    sizes = {"value_heads": 4, "key_dim": key_dim, "value_dim": 24, "qk_l2norm": True}
    inputs = make(Case(name, (3,) * 3, householders=3, **sizes))
    skip_if_declined(passes.verify, inputs, target)
    pool = passes.empty_states(inputs, 7)
    pool[1], pool[3] = inputs.initial_state[0], inputs.initial_state[1]
    table = torch.tensor([[1, 2, -1], [4, 3, 5], [-1, -1, -1]], dtype=torch.int32)
    accepted = torch.tensor([1, 2, 1], dtype=torch.int32)
    results = {}
    for backend, given in ((target, inputs), ("reference:naive", inputs), ("reference", inputs.double())):
        states = pool.to(given.initial_state.dtype, copy=True)
        found = passes.verify(
            given.but(initial_state=states),
            backend=backend,
            in_place=True,
            state_indices=table,
            num_accepted=accepted,
        )
        results[backend] = found.o, states
    (o, states), (naive_o, naive), (exact_o, exact) = results.values()
    assert_accurate("o", o[:2], exact_o[:2], naive_o[:2], inputs.q.dtype)
    assert not o[2].any()
    assert_accurate("states", states[1:6], exact[1:6], naive[1:6], inputs.q.dtype)
    for slot in (0, 6):
        assert_same_bits("a slot of no sequence", pool[slot], states[slot])


@pytest.mark.parametrize("writes", [2, 3, 16, 70])
@pytest.mark.parametrize("key_dim", [32, 64])
def test_states_on_the_way_change_no_bit(target, name, writes, key_dim):
    inputs = make(Case(name, (140, 70), packed=True, householders=writes, key_dim=key_dim, value_dim=32))
    skip_if_declined(passes.prefill, inputs, target)
    plain = passes.prefill(inputs, backend=target)
    plan = torch.tensor([(0, 64, 0), (0, 140, 1), (1, 64, 2), (0, 128, 3)], dtype=torch.int32)
    room, starts = passes.empty_states(inputs, 4), passes.empty_states(inputs, 5).unsqueeze(0)
    found = passes.prefill(
        inputs, backend=target, checkpoints=room, checkpoint_plan=plan, chunk_states=starts
    )
    assert_same_bits("o", plain.o, found.o)
    assert_same_bits("final_state", plain.final_state, found.final_state)
    assert_same_bits("the last state", found.final_state[0], room[1])
    for chunk, (row, slot) in enumerate([(None, None), (0, 64), (0, 128), (None, None), (1, 64)]):
        if row is not None:
            kept = room[{(0, 64): 0, (0, 128): 3, (1, 64): 2}[row, slot]]
            assert_same_bits("the state at a chunk's start", starts[0, chunk], kept)


def test_a_write_of_no_strength_is_none(name):
    inputs = make(Case(name, (20,) * 2, householders=3)).double()
    inputs.beta.unflatten(1, (-1, 3))[:, :, 1] = 0
    kept = {
        each: getattr(inputs, each).unflatten(1, (-1, 3))[:, :, [0, 2]].flatten(1, 2)
        for each in ("k", "v", "beta")
    }
    fewer = inputs.but(case=inputs.case.but(householders=2), **kept)
    one, two = passes.prefill(inputs, backend="reference"), passes.prefill(fewer, backend="reference")
    assert_exact("o", one.o, two.o)
    assert_exact("final_state", one.final_state, two.final_state)


def test_rows_of_decode_are_along_either_dimension(name):
    """`[1, N]` of q comes with `[1, N n]` of k: the writes of a row follow each other."""
    inputs = make(Case(name, (1,) * 5, householders=3, value_heads=4))
    along = inputs.but(
        **{
            each: x.flatten(0, 1)[None]
            for each in ("q", "k", "v", "g", "beta")
            if (x := getattr(inputs, each)) is not None
        }
    )
    states = inputs.initial_state.clone(), inputs.initial_state.clone()
    wanted, found = level1.decode(inputs, states[0])[0], level1.decode(along, states[1])[0]
    assert_same_bits("o", wanted, found.transpose(0, 1))
    assert_same_bits("states", *states)


@pytest.mark.parametrize("function", ["prefill", "verify", "segment", "decode"])
@pytest.mark.parametrize("wrong", ["k", "v", "beta"])
def test_rows_that_are_no_whole_tokens_are_refused(name, function, wrong):
    """Before anything is written: the states are in place."""
    tokens = 1 if function == "decode" else 4
    inputs = make(Case(name, (tokens,) * 2, householders=3))
    more = getattr(inputs, wrong)
    inputs = inputs.but(**{wrong: torch.cat([more, more[:, :1]], 1)})
    before = inputs.initial_state.clone()
    if wrong == "k" and function != "decode":
        says = rf"k must have n rows for each of the {tokens} tokens of q, n from 1 to 2\^24, got 13 rows"
    elif wrong == "k":  # four rows of one token are four writes, of which v and beta have three
        says = r"v must have shape \[B, T n, HV, V\]"
    else:
        says = rf"{wrong} must have shape \[B, T"
    call = {
        "prefill": lambda: level1.prefill(inputs, initial_state=None, state_pool=inputs.initial_state),
        "verify": lambda: level1.verify(inputs, inputs.initial_state),
        "segment": lambda: level1.segment(inputs),
        "decode": lambda: level1.decode(inputs, inputs.initial_state),
    }[function]
    with pytest.raises(ValueError, match=says):
        call()
    assert_same_bits("states", before, inputs.initial_state)


# The targets of a GPU that take several writes; :halves and :segments have other conditions besides.
TAKE_SEVERAL = {
    "prefill": {"sm90", "sm90:whole", "sm80", "sm80:whole", "sm80:step"},
    "decode": {"sm80"},
    "verify": {"sm80"},
    "segment": {"sm90", "sm80", "sm80:step"},
    "backward": {"sm90", "sm90:whole", "sm80", "sm80:whole", "sm80:step"},
}


def test_explain_knows_of_writes(name):
    taken = [row.target for row in cula.explain(name, writes=3, device="cpu") if row.verdict != "no"]
    assert taken
    assert taken[0].startswith("cpu")
    for pass_name, takes in TAKE_SEVERAL.items():
        for writes in (2, 3, 16, 64):
            for row in cula.explain(name, pass_name, writes=writes, device="sm_90"):
                # Where the kernels of GPUs are built. Three walks take no delta rule at all.
                if row.reason.startswith("runs on ") or row.target.endswith(":three_walks"):
                    continue
                chunked = row.target.startswith("sm90") and pass_name in ("prefill", "segment", "backward")
                if chunked and 16 % writes:
                    assert row.reason == f"takes writes of a token that divide 16, got {writes}"
                elif not row.target.endswith((":halves", ":segments")):
                    assert (row.verdict != "no") == (row.target in takes)
    for row in cula.explain(name, writes=2**15 + 1, device="sm_90"):
        if row.target == "sm80" and row.verdict == "no" and not row.reason.startswith("runs on "):
            assert row.reason == "takes up to 32768 writes a token, got 32769"
    with pytest.raises(ValueError, match="writes must be 1 for gdn, got 2"):
        cula.explain("gdn", writes=2)
    for writes in (0, 2**24 + 1):
        with pytest.raises(ValueError, match=rf"writes must be from 1 to 2\^24, got {writes}"):
            cula.explain(name, writes=writes)
