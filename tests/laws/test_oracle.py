# SPDX-License-Identifier: Apache-2.0
"""The C++ oracle against an independent float64 recurrence, on every algorithm, option and pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cula_testing import gradients, oracle, passes
from cula_testing.cases import DELTA, Inputs, make
from cula_testing.compare import assert_exact
from cula_testing.strategies import cases

REFERENCE = "reference"
pytestmark = pytest.mark.cpu_only("the oracle runs on the CPU")


def witness(case) -> tuple[Inputs, torch.Tensor, list[oracle.Sequence]]:
    inputs = make(case).double()
    return inputs, *oracle.run(inputs)


@given(data=st.data())
@pytest.mark.parametrize("call", [passes.prefill, passes.decode])
def test_prefill_and_decode(algorithm, call, data):
    inputs, o, sequences = witness(data.draw(cases(algorithm)))
    found = call(inputs, backend=REFERENCE)
    assert_exact("o", found.o, o)
    assert_exact("final_state", found.final_state, torch.stack([s.states[-1] for s in sequences]))


@given(data=st.data())
def test_states_on_the_way(algorithm, data):
    inputs, _, sequences = witness(data.draw(cases(algorithm)))
    chunk = data.draw(st.sampled_from([16, 32, 64]))
    lengths = [len(s.states) - 1 for s in sequences]
    plan = [
        (n, t, slot)
        for slot, (n, t) in enumerate(
            (n, t) for n, T in enumerate(lengths) for t in {*range(0, T + 1, 64), T}
        )
    ]
    starts = [[s.states[t] for t in range(0, T, chunk)] for s, T in zip(sequences, lengths, strict=True)]
    rows = [[state for row in starts for state in row]] if inputs.case.packed else starts
    chunk_states = passes.empty_states(inputs, len(rows) * len(rows[0])).unflatten(
        0, (len(rows), len(rows[0]))
    )
    found = passes.prefill(
        inputs,
        backend=REFERENCE,
        checkpoints=passes.empty_states(inputs, len(plan)),
        checkpoint_plan=torch.tensor(plan, dtype=torch.int32),
        chunk_states=chunk_states if chunk_states.numel() else None,
        chunk_tokens=chunk,
    )
    assert_exact("checkpoints", found.checkpoints, torch.stack([sequences[n].states[t] for n, t, _ in plan]))
    if found.chunk_states is not None:
        assert_exact("chunk_states", found.chunk_states, torch.stack([torch.stack(row) for row in rows]))


@given(data=st.data())
def test_verify(algorithm, data):
    inputs = make(data.draw(cases(algorithm, packed=False, state=True, pool=False))).double()
    N, S = inputs.q.shape[:2]
    parents = torch.tensor(
        [[data.draw(st.integers(-1, t - 1)) for t in range(S)] for _ in range(N)], dtype=torch.int32
    )
    snapshots = passes.empty_states(inputs, N * S).unflatten(0, (N, S))
    found = passes.verify(inputs, backend=REFERENCE, parents=parents, snapshots=snapshots)
    for n in range(N):
        tree = oracle.recurrence(inputs, n, 0, S, inputs.initial_state[n], parents=parents[n])
        assert_exact("o", found.o[n], tree.o)
        assert_exact("snapshots", found.snapshots[n], tree.states[1:])


@given(data=st.data())
def test_backward(algorithm, data):
    case = data.draw(cases(algorithm, pool=False))
    # A norm takes from gradients what lies along the vector: nearly all of collinear ones. So do several
    # writes along one key: each with a strength near 1 leaves a thousandth of what was, all of them nothing.
    if case.qk_l2norm or case.writes > 1:
        case = case.but(keys="random")
    if case.writes > 1 and case.key_dim == 1:
        case = case.but(key_dim=2)
    inputs = make(case).double()
    if inputs.initial_state is not None and data.draw(st.booleans()):
        count = inputs.case.sequences
        flags = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        inputs.has_initial_state = torch.tensor(flags)
    names = gradients.names(inputs)
    leaves = inputs.but(**{name: getattr(inputs, name).clone().requires_grad_() for name in names})
    o, sequences = oracle.run(leaves)
    d_o, d_final_state = gradients.upstream(inputs)
    loss = (o * d_o).sum() + sum(
        (sequence.states[-1] * d).sum() for sequence, d in zip(sequences, d_final_state, strict=True)
    )
    tensors = [getattr(leaves, name) for name in names]
    wanted = [torch.zeros_like(tensor) for tensor in tensors]
    if loss.requires_grad:  # a call without tokens and states depends on nothing
        wanted = torch.autograd.grad(loss, tensors, materialize_grads=True)
    found = gradients.backward(inputs, d_o, d_final_state, backend=REFERENCE)
    for name, expected in zip(names, wanted, strict=True):
        # A sum that cancels is as exact as its terms: of few channels a norm leaves a millionth of them, and
        # a write along the one key that all have a thousandth.
        cancels = (case.qk_l2norm and name in ("q", "k")) or (
            case.algorithm in DELTA and (case.keys == "collinear" or case.key_dim == 1)
        )
        assert_exact(f"d_{name}", found[name], expected, 1e-8 if cancels else 1e-11)


@given(data=st.data())
def test_segment(algorithm, data):
    case = data.draw(cases(algorithm, beta_per_value=False, state=True, pool=False))
    inputs, _, sequences = witness(case)
    found = passes.segment(inputs.but(initial_state=None), backend=REFERENCE)
    start, m = inputs.initial_state, found.m
    moved = start * m[:, :, None, :] if m.ndim == 3 else torch.einsum("nhij,nhvj->nhvi", m, start)
    assert_exact("M S + B", moved + found.b, torch.stack([s.states[-1] for s in sequences]))
