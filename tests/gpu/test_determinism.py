# SPDX-License-Identifier: Apache-2.0
"""The same bits from run to run, on shapes that fill the GPU and on shapes that do not."""

from __future__ import annotations

import itertools

import pytest
import torch

from cula_testing import passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

RUNS = 10
WIDE = {"key_dim": 128, "value_dim": 128}
SHAPES = {
    "many heads": {"lengths": (2048,), "heads": 32, "value_heads": 32},
    "one head": {"lengths": (16384,), "heads": 1, "value_heads": 1},
    "many lengths": {
        "lengths": (1300, 547, 0, 963, 271, 63, 1, 3063),
        "packed": True,
        "heads": 8,
        "value_heads": 8,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_run_after_run(algorithm, shape):
    """With other work on the GPU, so that blocks start in another order."""
    inputs = make(Case(algorithm, decay="slow", **WIDE, **SHAPES[shape]))
    noise, side = torch.randn(2048, 2048), torch.cuda.Stream()
    first = passes.prefill(inputs)
    for run in range(RUNS):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(run):
                noise = (noise @ noise).tanh()
        again = passes.prefill(inputs)
        for name, tensor in first.items():
            assert_same_bits(f"run {run}: {name}", tensor, getattr(again, name))
    side.synchronize()


def test_batch_invariant(algorithm):
    """A sequence gives the same bits alone, in a batch, and anywhere in it."""
    lengths = (4096, 1, 700, 63, 0, 8192)
    whole = make(Case(algorithm, lengths, packed=True, decay="slow", **WIDE))
    bounds = [0, *itertools.accumulate(lengths)]

    def only(chosen: tuple[int, ...]) -> Inputs:
        rows = [whole.rows(bounds[n], bounds[n + 1]) for n in chosen]
        part = whole.but(**{name: torch.cat([each[name] for each in rows], 1) for name in rows[0]})
        part.case = whole.case.but(lengths=tuple(lengths[n] for n in chosen))
        part.cu_seqlens = torch.tensor([0, *itertools.accumulate(part.case.lengths)], dtype=torch.int32)
        part.initial_state = whole.initial_state[list(chosen)]
        return part

    together = passes.prefill(whole, batch_invariant=True)
    for chosen in [*((n,) for n in range(len(lengths))), (5, 0), (3, 2, 1)]:
        part, begin = passes.prefill(only(chosen), batch_invariant=True), 0
        for i, n in enumerate(chosen):
            o = part.o[:, begin : begin + lengths[n]]
            assert_same_bits(f"{n} of {chosen}: o", together.o[:, bounds[n] : bounds[n + 1]], o)
            assert_same_bits(f"{n} of {chosen}: state", together.final_state[n], part.final_state[i])
            begin += lengths[n]
