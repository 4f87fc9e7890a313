# SPDX-License-Identifier: Apache-2.0
"""Laws that relate one call to another. Where two calls do the same arithmetic their bits agree; where they
cut the work differently both obey the error rule."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from cula_testing import passes
from cula_testing.cases import DELTA, GATED, Case, Inputs, make, state_like
from cula_testing.compare import assert_same_bits, errors
from cula_testing.device import kind
from cula_testing.process import run_python
from cula_testing.strategies import cases

CALLS = pytest.mark.parametrize("call", [passes.prefill, passes.decode], ids=["prefill", "decode"])


def assert_same(what: str, one: passes.Result, two: passes.Result) -> None:
    for name, tensor in one.items():
        assert_same_bits(f"{what}: {name}", tensor, getattr(two, name))


# Cutting along the tokens.


def in_pieces(cuts: list[int], call=passes.prefill):
    """A call on tokens cuts[i]..cuts[i + 1] after another, the state handed on."""

    def run(inputs: Inputs, backend: str) -> passes.Result:
        outputs = []
        for begin, end in itertools.pairwise(cuts):
            result = call(inputs.tokens(begin, end), backend=backend)
            outputs.append(result.o)
            inputs = inputs.but(initial_state=result.final_state)
        return passes.Result(o=torch.cat(outputs, dim=1), final_state=inputs.initial_state)

    return run


@given(data=st.data())
def test_prefill_of_a_and_b_is_prefill_of_a_then_of_b(algorithm, data):
    case = data.draw(cases(algorithm, packed=False, pool=False))
    cut = data.draw(st.integers(0, case.tokens))
    passes.assert_rule(in_pieces([0, cut, case.tokens]), make(case))


@given(data=st.data())
def test_prefill_is_a_loop_of_decode(algorithm, data):
    case = data.draw(cases(algorithm, packed=False, pool=False))
    case = case.but(lengths=tuple(min(length, 12) for length in case.lengths))
    passes.assert_rule(in_pieces(list(range(case.tokens + 1)), passes.decode), make(case))
    passes.assert_rule(in_pieces([0, case.tokens], passes.prefill), make(case))


# The same sequences, laid out differently.


def packed(inputs: Inputs) -> Inputs:
    """A batch of equal lengths as packed sequences."""
    N, T = inputs.q.shape[:2]
    flat = inputs.map(lambda tensor: tensor)
    for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            setattr(flat, name, tensor.flatten(0, 1)[None])
    flat.cu_seqlens = torch.arange(N + 1, dtype=torch.int32) * T
    return flat


@CALLS
@given(data=st.data())
def test_batch_is_varlen(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, packed=False)))
    batch, varlen = call(inputs), call(packed(inputs))
    assert_same("varlen", batch, dataclasses.replace(varlen, o=varlen.o.view_as(batch.o)))


@CALLS
@given(data=st.data())
def test_cu_seqlens_may_be_int32_or_int64(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, packed=True)))
    assert_same("int64", call(inputs), call(inputs.but(cu_seqlens=inputs.cu_seqlens.long())))


@CALLS
@given(data=st.data())
def test_permuting_sequences_permutes_results(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, packed=True, state=True, pool=False)).but(tail=0))
    N = inputs.case.sequences
    order = data.draw(st.permutations(range(N)))
    bounds = inputs.cu_seqlens.tolist()
    tokens = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in order])
    parts = [inputs.rows(bounds[n], bounds[n + 1]) for n in order]
    moved = inputs.but(**{name: torch.cat([part[name] for part in parts], 1) for name in parts[0]})
    lengths = torch.tensor([0, *(bounds[n + 1] - bounds[n] for n in order)])
    moved.cu_seqlens = lengths.cumsum(0).to(torch.int32)
    moved.initial_state = inputs.initial_state[list(order)]
    one, two = call(inputs), call(moved)
    assert_same("permuted", passes.Result(o=one.o[:, tokens], final_state=one.final_state[list(order)]), two)


@CALLS
@given(data=st.data())
def test_permuting_heads_permutes_results(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, state=True, pool=False)))
    H, group = inputs.case.heads, inputs.case.value_heads // inputs.case.heads
    order = torch.tensor(data.draw(st.permutations(range(H))))
    values = (order[:, None] * group + torch.arange(group)).flatten()
    moved = inputs.but(q=inputs.q[:, :, order], k=inputs.k[:, :, order], v=inputs.v[:, :, values])
    for name in ("g", "beta", "erase", "a_key", "b_key", "decay", "A_log", "dt_bias", "initial_state"):
        tensor = getattr(inputs, name)
        dim = {**dict.fromkeys(("g", "beta", "erase", "a_key", "b_key"), 2), "initial_state": 1}.get(name, 0)
        if tensor is not None:
            setattr(moved, name, tensor.index_select(dim, values))
    one, two = call(inputs), call(moved)
    assert_same("permuted", passes.Result(o=one.o[:, :, values], final_state=one.final_state[:, values]), two)


@CALLS
@given(data=st.data())
def test_grouped_heads_are_repeated_heads(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm)))
    group = inputs.case.value_heads // inputs.case.heads
    repeated = inputs.but(
        q=inputs.q.repeat_interleave(group, dim=2), k=inputs.k.repeat_interleave(group, dim=2)
    )
    assert_same("repeated", call(inputs), call(repeated))


@CALLS
@given(data=st.data())
def test_strided_is_contiguous(algorithm, call, data):
    case = data.draw(cases(algorithm))
    assert_same("strided", call(make(case.but(fused=False))), call(make(case.but(fused=True))))


def test_a_transposed_batch_is_a_stride(algorithm):
    """[T, B, H, D] memory, and q and k that broadcast over the batch."""
    inputs = make(Case(algorithm, (70, 70)))
    turned = inputs.but(v=inputs.v.transpose(0, 1).contiguous().transpose(0, 1))
    assert_same("turned", passes.prefill(inputs), passes.prefill(turned))
    shared = inputs.but(q=inputs.q[:1].expand_as(inputs.q), k=inputs.k[:1].expand_as(inputs.k))
    copied = shared.but(q=shared.q.contiguous(), k=shared.k.contiguous())
    assert_same("expanded", passes.prefill(copied), passes.prefill(shared))


@CALLS
@given(data=st.data())
def test_state_layout_changes_nothing(algorithm, call, data):
    case = data.draw(cases(algorithm, state=True))
    v_first, k_first = make(case.but(k_first=False)), make(case.but(k_first=True))
    assert_same("k_first", call(v_first), call(k_first))


# Determinism.


@CALLS
@given(data=st.data())
def test_two_runs_have_the_same_bits(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm)))
    assert_same("again", call(inputs), call(inputs))


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@CALLS
@pytest.mark.cpu_only("a GPU call uses one host thread")
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("heads", [1, 3])
def test_thread_count_changes_nothing(algorithm, call, heads):
    case = Case(
        algorithm, (200, 3, 90), packed=True, heads=heads, value_heads=heads, key_dim=128, value_dim=128
    )
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(call(make(case)))
    assert_same("2 threads", results[0], results[1])
    assert_same("5 threads", results[0], results[2])


@CALLS
@given(data=st.data())
def test_batch_composition_changes_nothing_when_batch_invariant(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm, packed=True, state=True, pool=False)))
    together = call(inputs, batch_invariant=True)
    bounds = inputs.cu_seqlens.tolist()
    for n, length in enumerate(inputs.case.lengths):
        span = slice(bounds[n], bounds[n + 1])
        one = inputs.but(**inputs.rows(bounds[n], bounds[n + 1]))
        one.case = inputs.case.but(lengths=(length,), tail=0)
        one.cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        one.initial_state = inputs.initial_state[n : n + 1]
        part = passes.Result(o=together.o[:, span], final_state=together.final_state[n : n + 1])
        assert_same(f"sequence {n}", part, call(one, batch_invariant=True))


# Poison.


@CALLS
@given(data=st.data())
def test_what_outputs_held_changes_nothing(algorithm, call, data):
    inputs = make(data.draw(cases(algorithm)))
    o, state = (
        passes.empty_o(inputs).fill_(7.0),
        passes.empty_states(inputs, inputs.case.sequences).fill_(7.0),
    )
    indices = torch.arange(inputs.case.sequences, dtype=torch.int32)
    assert_same("poison", call(inputs), call(inputs, o=o, final_state=state, final_state_indices=indices))


@CALLS
@given(data=st.data())
def test_a_poisoned_neighbour_changes_nothing(algorithm, call, data):
    """One sequence of the batch, and all tokens beyond the last, hold NaN."""
    case = data.draw(cases(algorithm, packed=True, state=True, pool=False, max_sequences=4)).but(tail=5)
    clean, sick = make(case), make(case)
    n = data.draw(st.integers(0, case.sequences - 1))
    bounds = [*clean.cu_seqlens.tolist(), case.tokens]
    for begin, end in (bounds[n : n + 2], bounds[-2:]):
        for tensor in sick.rows(begin, end).values():
            tensor[:] = float("nan")
    sick.initial_state[n] = float("nan")
    healthy = torch.ones(case.tokens, dtype=torch.bool)
    healthy[bounds[n] : bounds[n + 1]] = False
    others = [m for m in range(case.sequences) if m != n]

    one, two = call(clean), call(sick)
    assert_same_bits("o", one.o[:, healthy], two.o[:, healthy])
    assert_same_bits("final_state", one.final_state[others], two.final_state[others])
    assert not two.o[:, bounds[-2] :].any(), "tokens beyond the last sequence give zeros"


@pytest.mark.cpu_only("the allocator of the C library; tests/gpu/test_memory.py has torch's")
def test_what_the_workspace_held_changes_nothing():
    """The same calls in processes whose allocator fills memory with different rubbish."""
    fingerprints = {
        run_python("-m", "cula_testing.fingerprint", MALLOC_PERTURB_=byte) for byte in ("0", "1", "85")
    }
    assert len(fingerprints) == 1
    assert fingerprints.pop()


# Options of the kernel against the same thing done outside: FLA's suite asks 1e-4 here. The chunked kernels
# of GPUs multiply operands of 16 bits where the inputs have no more: a gate that differs by 3e-7 rounds some
# of them the other way, which changes o by up to 3e-3 (docs/log/2026-11-24-plan.md). There both calls obey
# the error rule.


def assert_alike(call, inside: Inputs, outside: Inputs) -> None:
    if call is passes.prefill and kind() == "cuda" and inside.case.dtype != torch.float32:
        for inputs in (inside, outside):
            passes.assert_rule(lambda inputs, backend: call(inputs, backend=backend), inputs)
        return
    o = passes.empty_o(inside).float()
    one, two = call(inside, o=o.clone()), call(outside, o=o.clone())
    for what in ("o", "final_state"):
        found = errors(getattr(one, what), getattr(two, what).double())
        assert found.rms <= 1e-4, f"{what}: {found}"


@CALLS
@given(data=st.data())
@pytest.mark.parametrize("algorithm", GATED)
def test_gate_in_kernel_is_gate_outside(algorithm, call, data):
    fixed = {"gate": data.draw(st.sampled_from(["softplus", "bounded"])), "state_dtype": torch.float32}
    inputs = make(data.draw(cases(algorithm, head_decay=False, gate_dtype=torch.float32, **fixed)))
    raw = inputs.g
    if inputs.dt_bias is not None:
        raw = raw + inputs.dt_bias
    rate = torch.ones(inputs.case.value_heads) if inputs.A_log is None else inputs.A_log.exp()
    rate = rate[:, None] if raw.ndim == 4 else rate
    if inputs.case.gate == "softplus":
        log_decay = -rate * functional.softplus(raw, threshold=1e3)
    else:
        log_decay = inputs.case.lower_bound * torch.sigmoid(rate * raw)
    outside = inputs.but(g=log_decay, A_log=None, dt_bias=None, case=inputs.case.but(gate="log_decay"))
    assert_alike(call, inputs, outside)


@CALLS
@given(data=st.data())
@pytest.mark.parametrize("algorithm", DELTA)
def test_beta_logits_in_kernel_are_sigmoids_outside(algorithm, call, data):
    case = data.draw(
        cases(algorithm, beta_is_logit=True, gate_dtype=torch.float32, state_dtype=torch.float32)
    )
    inputs = make(case)
    plain = case.but(beta_is_logit=False, allow_neg_eigval=False)
    beta, erase, most = inputs.beta.sigmoid(), inputs.erase, 2 if case.allow_neg_eigval else 1
    if erase is None:
        outside = inputs.but(beta=most * beta, case=plain)
    else:
        outside = inputs.but(beta=beta, erase=most * erase.sigmoid(), case=plain)
    assert_alike(call, inputs, outside)


# One algorithm written as another.


@pytest.mark.parametrize(("narrow", "wider"), [("gdn", "kda"), ("simple_gla", "gla")])
def test_a_gate_that_is_equal_in_all_channels_is_a_gate_per_token(narrow, wider):
    inputs = make(Case(narrow, (130,), dtype=torch.float32))
    K = inputs.case.key_dim
    channels = inputs.but(
        g=inputs.g[..., None].expand(*inputs.g.shape, K).contiguous(), case=inputs.case.but(algorithm=wider)
    )

    def either(_, backend):
        if backend == "reference":
            return passes.prefill(inputs.double(), backend=backend)
        return passes.prefill(channels, backend=backend)

    passes.assert_rule(either, inputs)


@given(data=st.data())
@pytest.mark.parametrize(("decayed", "plain"), [("lightning", "linear"), ("delta_per_head", "delta")])
def test_a_decay_of_zero_is_no_decay(decayed, plain, data):
    inputs = make(data.draw(cases(decayed, decay="zero")))
    without = inputs.but(decay=None, case=inputs.case.but(algorithm=plain))

    def either(given, backend):
        return passes.prefill(without if backend == "" else given, backend=backend)

    passes.assert_rule(either, inputs)


def test_scale_acts_on_the_output_alone(algorithm):
    inputs = make(Case(algorithm, (130,), dtype=torch.float32, scale=1.0))
    one, two = passes.prefill(inputs), passes.prefill(inputs.but(case=inputs.case.but(scale=4.0)))
    assert_same_bits("o", one.o * 4, two.o)
    assert_same_bits("final_state", one.final_state, two.final_state)


# Addresses beyond 2^31 elements.


@pytest.mark.large
def test_strides_beyond_32_bits(algorithm, sparse):
    """Sequences and slots that lie further apart than 2^31 elements."""
    case = Case(algorithm, (70, 70), heads=1, value_heads=1, state_dtype=torch.bfloat16)
    inputs = make(case)
    far = 2**31 + 2**20
    memory = sparse(torch.bfloat16, 3 * far)
    strides = {"q": 0, "k": 2**16, "v": 2**17}
    spread = {
        name: memory.as_strided(
            getattr(inputs, name).shape, (far, *getattr(inputs, name).stride()[1:]), offset
        )
        for name, offset in strides.items()
    }
    for name, view in spread.items():
        view.copy_(getattr(inputs, name))
    pool = memory.as_strided((3, 1, 64, 64), (far - 4096, 4096, 64, 1), 2**18)
    pool[[0, 2]] = inputs.initial_state
    slots = torch.tensor([0, 2], dtype=torch.int32)
    distant = inputs.but(**spread, initial_state=pool, initial_state_indices=slots)
    near, result = passes.prefill(inputs), passes.prefill(distant, in_place=True)
    assert_same_bits("o", near.o, result.o)
    assert_same_bits("final_state", near.final_state, pool[[0, 2]])
    assert not state_like(case, 1, fill=pool[1:2]).any()
