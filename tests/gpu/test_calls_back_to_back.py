# SPDX-License-Identifier: Apache-2.0
"""Calls one after another and beside other work: no bit changes. Carries start before the kernel before them
has ended; before each call comes one of other inputs, so that what is read too early is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

RUNS = 20
WIDE = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
SHAPES = {
    "one": {"lengths": (2100,)},
    "batch": {"lengths": (1000, 1000)},
    "packed": {"lengths": (600, 0, 1, 1400), "packed": True, "tail": 9},
}
# Of 32 the CTAs that prepare them are more than are resident at once, and not so many that a carry waits for
# the last to end; of 8 it waits, and of 64 that share keys in fours a CTA prepares two. One makes segments.
MANY, FEW = 32, 8
HEADS = [(1, 1), (FEW, FEW), (MANY, MANY), (16, 64), (128, 128)]


def inputs_of(algorithm: str, shape: str, heads: int, value_heads: int, seed: int = 0) -> Inputs:
    case = Case(algorithm, heads=heads, value_heads=value_heads, seed=seed, **WIDE, **SHAPES[shape])
    return make(case, draw_on="cuda")


@contextmanager
def busy_device() -> Iterator[None]:
    """Another stream keeps multiprocessors from the calls, now more of them and now fewer; both begin when
    all of it has been asked for."""
    side, matrix = torch.cuda.Stream(), torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda._sleep(50_000_000)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(400):
            matrix @ matrix[:, : 1024 >> i % 4]
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla", "delta"])
def test_heads_that_start_together_change_no_bit(algorithm, shape, backend):
    inputs, others = (inputs_of(algorithm, shape, MANY, MANY, seed) for seed in (0, 1))
    alone = passes.prefill(inputs.first_heads(FEW), backend=backend, batch_invariant=True)
    for _ in range(RUNS):
        passes.prefill(others, backend=backend, batch_invariant=True)
        whole = passes.prefill(inputs, backend=backend, batch_invariant=True)
        assert_same_bits("o", alone.o, whole.o[:, :, :FEW].contiguous())
        assert_same_bits("final_state", alone.final_state, whole.final_state[:, :FEW].contiguous())


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gla"])
def test_a_busy_device_changes_no_bit(algorithm, shape, heads, backend):
    inputs, others = (inputs_of(algorithm, shape, *heads, seed) for seed in (0, 1))
    alone, beside = passes.prefill(inputs, backend=backend), []
    with busy_device():
        for _ in range(RUNS):
            passes.prefill(others, backend=backend)
            beside.append(passes.prefill(inputs, backend=backend))
    for result in beside:
        assert_same_bits("o", alone.o, result.o)
        assert_same_bits("final_state", alone.final_state, result.final_state)


def test_no_tokens_after_a_call(algorithm, backend):
    """A call that prepares nothing starts from what the call before leaves, when that has ended."""
    nothing = make(Case(algorithm, (0, 0), heads=4, value_heads=4, **WIDE), draw_on="cuda")
    for seed in range(RUNS):
        before = make(
            Case(algorithm, (2000, 2000), heads=4, value_heads=4, seed=seed, **WIDE), draw_on="cuda"
        )
        left = passes.prefill(before, backend=backend).final_state
        found = passes.prefill(nothing.but(initial_state=left), backend=backend).final_state
        assert_same_bits("final_state", left, found)


@pytest.mark.parametrize("tokens", [1, 4], ids=["decode", "drafts"])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gdn2"])
def test_forks_start_from_what_was_written_last(algorithm, rows, tokens):
    """Decode and verify start beside the kernel that settles forks. All rows start from slot 0, which the
    last one overwrites; inputs and pool are filled anew before each call, in the same memory."""
    case = Case(algorithm, (tokens,) * rows, heads=4, value_heads=8, **WIDE)
    ends = torch.arange(tokens * rows, dtype=torch.int32).flip(0).view(rows, tokens)

    def call(inputs: Inputs) -> passes.Result:
        inputs = inputs.but(initial_state_indices=torch.zeros(rows, dtype=torch.int32))
        if tokens == 1:
            return passes.decode(inputs, in_place=True, final_state_indices=ends[:, 0])
        return passes.verify(inputs, in_place=True, state_indices=ends)

    def drawn(seed: int) -> Inputs:
        inputs = make(case.but(seed=seed))
        draw = torch.Generator(inputs.q.device).manual_seed(seed)
        states = torch.randn(tokens * rows, 8, 128, 128, generator=draw)
        return inputs.but(initial_state=states)

    given = [drawn(seed) for seed in (0, 1)]
    alone = []
    for inputs in given:
        pool = inputs.initial_state.clone()
        alone.append((call(inputs.but(initial_state=pool)).o, pool))
    memory = given[0].map(torch.clone)
    found = []
    for _ in range(RUNS):
        for inputs in given:
            for name, tensor in {**memory.tensors(), **memory.states()}.items():
                if tensor is not None:
                    tensor.copy_(getattr(inputs, name))
            found.append((call(memory).o, memory.initial_state.clone()))
    for i, (o, pool) in enumerate(found):
        assert_same_bits("o", alone[i % 2][0], o)
        assert_same_bits("pool", alone[i % 2][1], pool)


@pytest.mark.parametrize(("rows", "kernels"), [(1, ["verify<"]), (3, ["settle_forks", "verify<"])])
def test_what_runs_of_a_verification_that_may_have_forks(rows, kernels):
    """One sequence has none, and several are settled by one kernel."""
    inputs = make(Case("kda", (4,) * rows, **WIDE))
    inputs = inputs.but(initial_state=torch.randn(5 * rows, 2, 128, 128))
    inputs.initial_state_indices = torch.arange(rows, dtype=torch.int32)
    table = torch.arange(rows, 5 * rows, dtype=torch.int32).view(rows, 4)
    names = device.kernels_of(lambda: passes.verify(inputs, in_place=True, state_indices=table))
    assert len(names) == len(kernels)
    assert all(kernel in name for kernel, name in zip(kernels, names, strict=True))
