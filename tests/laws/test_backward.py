# SPDX-License-Identifier: Apache-2.0
"""The laws of gradients: the error rule on generated problems, and what relates the backward pass of one call
to that of another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cula import _ops
from cula_testing import gradients, level1, passes
from cula_testing.cases import DELTA, GATED, Case, Inputs, make
from cula_testing.compare import assert_same_bits, errors
from cula_testing.strategies import cases

# Rounding of gradients that two orders of the same sums may differ by, in float32 calls.
ROUNDING = 1e-5


def run(inputs: Inputs, **options) -> gradients.Gradients:
    return gradients.backward(inputs, *gradients.upstream(inputs), **options)


def assert_same(one: gradients.Gradients, two: gradients.Gradients) -> None:
    for name, gradient in one.items():
        assert_same_bits(f"d_{name}", gradient, two[name])


def assert_close(one: gradients.Gradients, two: gradients.Gradients, limit: float = ROUNDING) -> None:
    for name, gradient in one.items():
        found = errors(gradient, two[name].double())
        assert max(found.rms, found.max) <= limit, f"d_{name}: {found}"


@given(data=st.data())
def test_generated(algorithm, data):
    case = data.draw(cases(algorithm, pool=False, backend=""))
    if case.dtype == torch.float32:  # docs/api.md, "Numbers": gradients of collinear keys in chunks
        case = case.but(keys="random")
    gradients.assert_rule(make(case))


def always() -> dict[str, Case]:
    """Problems that other backward passes got wrong once."""
    rows: dict[str, Case] = {}
    for name in (*GATED, "lightning", "linear", "delta", "delta_per_head"):
        for length in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129):
            rows[f"{name}-T{length}"] = Case(name, (length,), key_dim=32, value_dim=48)
        rows[f"{name}-zero_length"] = Case(name, (0, 16, 0, 70, 0), packed=True, tail=5, key_dim=32)
    for name in GATED:
        for gate in ("log_decay", "softplus", "bounded"):
            for decay in ("zero", "strong", "extreme", "mixed"):
                rows[f"{name}-{gate}-{decay}"] = Case(name, (140,), gate=gate, decay=decay, key_dim=32)
    for name in DELTA:
        like = Case(name, (200,), heads=1, value_heads=1, key_dim=64, value_dim=64, qk_l2norm=True)
        rows[f"{name}-collinear"] = like.but(keys="collinear", decay="slow", beta_is_logit=True)
        rows[f"{name}-neg_eigval"] = like.but(beta_is_logit=True, allow_neg_eigval=True)
    return rows


ALWAYS = always()


@pytest.mark.parametrize("name", ALWAYS)
def test_always(name):
    gradients.assert_rule(make(ALWAYS[name]))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", DELTA)
def test_write_strengths_at_their_ends(name, beta):
    inputs = make(Case(name, (130,), key_dim=32, value_dim=32))
    inputs.beta[:, 3::7] = beta
    gradients.assert_rule(inputs)


@pytest.mark.parametrize("name", ["kda", "gdn", "delta"])
def test_zero_keys_with_norms(name):
    inputs = make(Case(name, (70,), qk_l2norm=True, key_dim=32, value_dim=32))
    inputs.q[:, 5], inputs.k[:, 6] = 0, 0
    gradients.assert_rule(inputs)


# Pieces of one call.


@given(data=st.data())
def test_chain_rule(algorithm, data):
    """The backward of a sequence is that of its end, and then that of its beginning with the gradient of the
    state between them. Gates are float32: a bfloat16 gradient that is rounded the other way would exceed the
    limit."""
    case = data.draw(cases(algorithm, packed=False, pool=False, backend="", dtype=torch.float32))
    float32 = {"state_dtype": torch.float32, "gate_dtype": torch.float32}
    case = case.but(state=True, decay="slow", keys="random", fused=False, **float32)
    inputs, cut = make(case), data.draw(st.integers(0, case.tokens))
    first, last = inputs.tokens(0, cut), inputs.tokens(cut, case.tokens)
    last.initial_state = passes.prefill(first).final_state
    d_o, d_final_state = gradients.upstream(inputs)
    whole = gradients.backward(inputs, d_o, d_final_state)
    late = gradients.backward(last, d_o[:, cut:], d_final_state)
    early = gradients.backward(first, d_o[:, :cut], late["initial_state"])
    joined = {}
    for name in whole:
        if name == "initial_state":
            joined[name] = early[name]
        elif name in ("A_log", "dt_bias"):
            joined[name] = early[name] + late[name]
        else:
            joined[name] = torch.cat([early[name], late[name]], dim=1)
    assert_close(whole, joined, 1e-4)


@given(data=st.data())
def test_linear_in_what_the_loss_hands_back(algorithm, data):
    case = data.draw(cases(algorithm, pool=False, backend="", dtype=torch.float32))
    inputs = make(case.but(gate_dtype=torch.float32))
    d_o, d_final_state = gradients.upstream(inputs)
    once = gradients.backward(inputs, d_o, d_final_state)
    twice = gradients.backward(inputs, 4 * d_o, 4 * d_final_state)
    for name, gradient in once.items():
        # Subnormal numbers have fewer digits: four times one is not one with the same digits.
        normal = gradient.abs() > 2.0**-100
        assert_same_bits(f"d_{name}", 4 * gradient[normal], twice[name][normal])
        assert (twice[name][~normal].abs() <= 2.0**-90).all(), name
    nothing = gradients.backward(inputs, None, None)
    for name, gradient in nothing.items():
        assert not gradient.any(), name
    zeros = gradients.backward(inputs, torch.zeros_like(d_o), torch.zeros_like(d_final_state))
    for name, gradient in zeros.items():
        assert not gradient.any(), name


@given(data=st.data())
def test_absent_is_zero(algorithm, data):
    inputs = make(data.draw(cases(algorithm, pool=False, backend="")))
    d_o, d_final_state = gradients.upstream(inputs)
    assert_same(
        gradients.backward(inputs, d_o, None),
        gradients.backward(inputs, d_o, torch.zeros_like(d_final_state)),
    )
    assert_same(
        gradients.backward(inputs, None, d_final_state),
        gradients.backward(inputs, torch.zeros_like(d_o), d_final_state),
    )


@given(data=st.data())
def test_no_initial_state_is_one_of_zeros(algorithm, data):
    inputs = make(data.draw(cases(algorithm, pool=False, state=True, backend="")))
    assert_same(run(inputs.but(initial_state=None)), run(inputs.but(initial_state=0 * inputs.initial_state)))


# The same call, laid out differently.


@given(data=st.data())
def test_strided_is_contiguous(algorithm, data):
    case = data.draw(cases(algorithm, pool=False, backend=""))
    assert_same(run(make(case.but(fused=False))), run(make(case.but(fused=True))))


@given(data=st.data())
def test_layouts_of_states(algorithm, data):
    case = data.draw(cases(algorithm, pool=False, state=True, backend=""))
    assert_same(run(make(case.but(k_first=False))), run(make(case.but(k_first=True))))


def test_a_gradient_that_broadcasts(algorithm):
    """`o.sum().backward()` hands back one number with strides of 0."""
    inputs = make(Case(algorithm, (70,), value_heads=4))
    one = torch.ones((), dtype=inputs.v.dtype).expand(inputs.o_shape)
    rows = torch.ones(inputs.v.shape[-1], dtype=inputs.v.dtype).expand(inputs.o_shape)
    wanted = gradients.backward(inputs, one.contiguous(), None)
    assert_same(wanted, gradients.backward(inputs, one, None))
    assert_same(wanted, gradients.backward(inputs, rows, None))


# The dimensions that are one number each, expanded.
EXPANDED = {
    "q": (1, 2, 3), "k": (1,), "v": (2, 3), "g": (1, 2), "beta": (1, 2), "initial_state": (0, 1),
    "A_log": (0,), "dt_bias": (0,), "erase": (1, 2), "a_key": (1,), "b_key": (2,),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPANDED)
def test_inputs_with_strides_of_zero(algorithm, name):
    """Gradients are those of the same numbers written out, and add up in what was expanded."""
    gate = "softplus" if algorithm in ("kda", "gdn", "gdn2") else "log_decay"
    inputs = make(Case(algorithm, (70, 30), packed=True, value_heads=4, gate=gate, key_dim=32, value_dim=32))
    if getattr(inputs, name) is None:
        pytest.skip(f"has no {name} here")
    one = getattr(inputs, name)
    for dim in EXPANDED[name]:
        one = one.narrow(dim, 0, 1)
    whole = one.expand(getattr(inputs, name).shape)
    wanted = run(inputs.but(**{name: whole.contiguous()}))
    assert_same(run(inputs.but(**{name: whole})), wanted)
    leaf = one.clone().requires_grad_()
    o, final_state = level1.prefill(inputs.but(**{name: leaf.expand(whole.shape)}))
    d_o, d_final_state = gradients.upstream(inputs)
    (found,) = torch.autograd.grad((o, final_state), leaf, (d_o, d_final_state.to(final_state)))
    summed = wanted[name].double().sum_to_size(leaf.shape)
    torch.testing.assert_close(found.double(), summed, rtol=2e-2, atol=1e-2 * float(summed.abs().max()))


@given(data=st.data())
def test_permuting_heads_permutes_gradients(algorithm, data):
    inputs = make(data.draw(cases(algorithm, pool=False, fused=False, backend="")))
    H, group = inputs.case.heads, inputs.case.value_heads // inputs.case.heads
    order = torch.tensor(data.draw(st.permutations(range(H))))
    values = (order[:, None] * group + torch.arange(group)).flatten()
    places = {"q": (2, order), "k": (2, order), "initial_state": (1, values)}
    places |= dict.fromkeys(("v", "g", "beta", "erase", "a_key", "b_key"), (2, values))
    places |= dict.fromkeys(("decay", "A_log", "dt_bias"), (0, values))

    def permuted(name, x):
        dim, heads = places[name]
        return x.index_select(dim, heads)

    moved = {name: permuted(name, x) for name in places if (x := getattr(inputs, name)) is not None}
    d_o, d_final_state = gradients.upstream(inputs)
    one = gradients.backward(inputs, d_o, d_final_state)
    two = gradients.backward(
        inputs.but(**moved), permuted("v", d_o), permuted("initial_state", d_final_state)
    )
    assert_same({name: permuted(name, gradient) for name, gradient in one.items()}, two)


@given(data=st.data())
def test_batch_composition_changes_no_gradient_when_batch_invariant(algorithm, data):
    """Those of a gate's parameters are sums over all sequences."""
    inputs = make(data.draw(cases(algorithm, packed=True, state=True, pool=False, backend="")))
    d_o, d_final_state = gradients.upstream(inputs)
    together = gradients.backward(inputs, d_o, d_final_state, batch_invariant=True)
    bounds = inputs.cu_seqlens.tolist()
    for n, length in enumerate(inputs.case.lengths):
        tokens, row = slice(bounds[n], bounds[n + 1]), slice(n, n + 1)
        one = inputs.but(**inputs.rows(bounds[n], bounds[n + 1]))
        one.case = inputs.case.but(lengths=(length,), tail=0)
        one.cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        one.initial_state = inputs.initial_state[row]
        alone = gradients.backward(one, d_o[:, tokens], d_final_state[row], batch_invariant=True)
        for name, gradient in alone.items():
            if name not in ("A_log", "dt_bias"):
                rows = inputs.span(name, bounds[n], bounds[n + 1])
                part = together[name][row] if name == "initial_state" else together[name][:, rows]
                assert_same_bits(f"d_{name} of sequence {n}", gradient, part)


def test_packed_is_a_batch(algorithm):
    inputs = make(Case(algorithm, (70, 70)))
    flat = inputs.map(lambda tensor: tensor)
    for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            setattr(flat, name, tensor.flatten(0, 1)[None])
    flat.cu_seqlens = torch.tensor([0, 70, 140], dtype=torch.int32)
    d_o, d_final_state = gradients.upstream(inputs)
    one = gradients.backward(inputs, d_o, d_final_state)
    two = gradients.backward(flat, d_o.flatten(0, 1)[None], d_final_state)
    assert_same({name: gradient.view_as(two[name]) for name, gradient in one.items()}, two)


def test_grouped_heads_are_repeated_heads(algorithm):
    """Gradients of shared queries and keys are sums over the value heads that share them."""
    inputs = make(Case(algorithm, (70,), heads=2, value_heads=6, dtype=torch.float32))
    repeated = inputs.but(q=inputs.q.repeat_interleave(3, 2), k=inputs.k.repeat_interleave(3, 2))
    one, two = run(inputs), run(repeated)
    for name in ("q", "k"):
        two[name] = two[name].unflatten(2, (2, 3)).sum(3)
    assert_close(one, two)


# Which gradients, and where.


@given(data=st.data())
def test_a_subset_has_the_bits_of_all(algorithm, data):
    inputs = make(data.draw(cases(algorithm, pool=False, backend="")))
    everything = run(inputs)
    wanted = data.draw(st.lists(st.sampled_from(sorted(everything)), unique=True))
    some = run(inputs, wanted=wanted)
    assert sorted(some) == sorted(wanted)
    assert_same(some, everything)


def test_the_two_overloads_agree(algorithm):
    inputs = make(Case(algorithm, (33, 20), packed=True, value_heads=4, state=True, k_first=True))
    d_o, d_final_state = gradients.upstream(inputs)
    names = gradients.names(inputs)
    wanted = sum(_ops.bit("gradients") << _ops.GRADIENTS.index(name) for name in names)
    named = {**inputs.tensors(), "initial_state": inputs.initial_state}
    named |= {"d_o": d_o, "d_final_state": d_final_state}
    options = _ops.pack(algorithm, k_first=True) + wanted
    made = dict(zip(_ops.GRADIENTS, torch.ops.cula.backward.default(options=options, **named), strict=True))
    assert [name for name, gradient in made.items() if gradient is not None] == names
    assert made["initial_state"].shape[-2:] == (inputs.q.shape[3], inputs.v.shape[3])
    made["initial_state"] = made["initial_state"].mT
    found = gradients.backward(inputs, d_o, d_final_state)
    assert_same(found, made)


def test_tokens_of_no_sequence_get_zeros(algorithm):
    inputs = make(Case(algorithm, (9, 0, 20), packed=True, tail=7))
    for name, gradient in run(inputs).items():
        if name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
            assert not gradient[:, inputs.span(name, 29, 36)].any(), name
            assert gradient[:, inputs.span(name, 0, 29)].any(), name


def test_empty_sequences_hand_the_state_on(algorithm):
    inputs = make(Case(algorithm, (9, 0, 20), packed=True, state=True))
    d_o, d_final_state = gradients.upstream(inputs)
    found = gradients.backward(inputs, d_o, d_final_state)
    assert_same_bits("d_initial_state", found["initial_state"][1], d_final_state[1])
    inputs.has_initial_state = torch.tensor([True, False, False])
    found = gradients.backward(inputs, d_o, d_final_state)
    assert not found["initial_state"][1:].any()
    assert found["initial_state"][0].any()


def test_not_a_number_stays_in_its_sequence(algorithm):
    inputs = make(Case(algorithm, (70, 20, 70), packed=True, state=True))
    d_o, d_final_state = gradients.upstream(inputs)
    clean = gradients.backward(inputs, d_o, d_final_state)
    d_o[:, 80] = float("nan")
    found = gradients.backward(inputs, d_o, d_final_state)
    for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
        if name in found:
            for span in (inputs.span(name, 0, 70), inputs.span(name, 90, 160)):
                assert_same_bits(name, found[name][:, span], clean[name][:, span])
    assert_same_bits("d_initial_state", found["initial_state"][::2], clean["initial_state"][::2])


def test_two_runs_give_the_same_bits(algorithm):
    inputs = make(Case(algorithm, (150, 70), packed=True, value_heads=4))
    assert_same(run(inputs), run(inputs))


# Gates and strengths inside the call are those outside of it.


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("name", GATED)
def test_a_gate_in_the_call_is_one_outside(name, gate):
    inputs = make(Case(name, (70,), gate=gate, dtype=torch.float32, state=False))
    case = inputs.case
    leaves = {each: getattr(inputs, each).clone().requires_grad_() for each in ("g", "A_log", "dt_bias")}
    bias = leaves["dt_bias"].view(inputs.g.shape[2:])
    rate = leaves["A_log"].exp().view(-1, *[1] * (inputs.g.ndim - 3))
    x = leaves["g"] + bias
    if gate == "softplus":
        a = -rate * torch.nn.functional.softplus(x)
    else:
        a = case.lower_bound * torch.sigmoid(rate * x)
    d_o, _ = gradients.upstream(inputs)
    d_a = gradients.backward(
        inputs.but(case=case.but(gate="log_decay"), g=a.detach(), A_log=None, dt_bias=None), d_o, None
    )["g"]
    wanted = torch.autograd.grad(a, leaves.values(), d_a)
    assert_close(
        gradients.backward(inputs, d_o, None, wanted=leaves), dict(zip(leaves, wanted, strict=True)), 1e-4
    )


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("name", DELTA)
def test_a_logit_in_the_call_is_a_strength_outside(name, allow_neg_eigval):
    like = Case(name, (70,), beta_is_logit=True, allow_neg_eigval=allow_neg_eigval, dtype=torch.float32)
    inputs = make(like)
    erases, most = inputs.erase is not None, 2 if allow_neg_eigval else 1
    logits = {"beta": inputs.beta.clone().requires_grad_()}
    made = {"beta": logits["beta"].sigmoid() * (1 if erases else most)}
    if erases:
        logits["erase"] = inputs.erase.clone().requires_grad_()
        made["erase"] = logits["erase"].sigmoid() * most
    plain = like.but(beta_is_logit=False, allow_neg_eigval=False)
    wanted = run(inputs.but(case=plain, **{each: x.detach() for each, x in made.items()}))
    for each, x in made.items():
        (wanted[each],) = torch.autograd.grad(x, logits[each], wanted[each])
    assert_close(run(inputs), wanted, 1e-4)
