# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: what was captured once is right for whatever its tensors hold at replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cula
from cula_testing import passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits
from cula_testing.kinds import KINDS, assert_same_results, ready


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("name", KINDS)
def test_replay_is_eager(algorithm, name):
    """Other values, other lengths of the same total, other slots and plans."""
    captured = ready(name, algorithm)
    graph = capture(captured)
    for seed in (1, 2, 3, 0):
        eager = ready(name, algorithm, seed)
        captured.overwrite(eager)
        graph.replay()
        eager()
        assert_same_results(f"seed {seed}", eager, captured)


def test_replay_with_fewer_rows():
    """A server captures its largest batch and pads smaller ones with null rows."""
    case = Case("kda", (1,) * 8, pool=True, key_dim=128, value_dim=128)
    inputs = make(case)
    o, rows = passes.empty_o(inputs), inputs.initial_state_indices.clone()
    graph = capture(lambda: passes.decode(inputs, o=o, in_place=True))
    for live in (8, 3, 0, 1):
        fresh = make(case)
        inputs.initial_state.copy_(fresh.initial_state)
        inputs.initial_state_indices.copy_(torch.where(torch.arange(8) < live, rows, -1))
        o.fill_(float("nan"))
        graph.replay()
        wanted = passes.decode(fresh)
        assert_same_bits("o", wanted.o[:live], o[:live])
        assert not o[live:].any()
        held = make(case).initial_state
        held[rows[:live].long()] = wanted.final_state[:live]
        assert_same_bits("pool", held, inputs.initial_state)


def test_a_plan_of_checkpoints_that_the_graph_makes():
    """The lengths of a replay decide which states are kept, and no host reads them."""
    x = make(Case("gdn", (200, 64, 130), packed=True, key_dim=128, value_dim=128))
    table = torch.arange(1, 19, dtype=torch.int32).view(3, 6)
    kept, o = torch.zeros(19, x.v.shape[2], 128, 128), passes.empty_o(x)

    def call() -> None:
        plan = cula.checkpoint_plan(x.cu_seqlens, 64, table, tokens=394, null_index=0)
        cula.cula_gdn(
            x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens, out=o,
            checkpoints=cula.Checkpoints(kept, plan),
        )  # fmt: skip

    graph = capture(call)
    for lengths, slots in (
        ((0, 200, 264, 394), [1, 2, 3, 7, 13, 14]),
        ((0, 64, 127, 394), [1, 13, 14, 15, 16]),
        ((0, 0, 0, 394), [13, 14, 15, 16, 17, 18]),
        ((0, 63, 126, 189), []),
    ):
        x.cu_seqlens.copy_(torch.tensor(lengths))
        kept.fill_(float("nan"))
        graph.replay()
        replayed, found = kept.clone(), o.clone()
        assert [slot for slot in range(19) if not replayed[slot].isnan().any()] == slots
        kept.fill_(float("nan"))
        call()
        assert_same_bits("kept", kept, replayed)
        assert_same_bits("o", o, found)


def test_two_graphs_share_no_memory():
    """Replays of two graphs, interleaved and on two streams."""
    calls = [ready("varlen", "kda", seed) for seed in (0, 1)]
    graphs, streams = [capture(call) for call in calls], [torch.cuda.Stream() for _ in calls]
    for call in calls:
        for tensor in call.results().values():
            tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for seed, call in enumerate(calls):
        eager = ready("varlen", "kda", seed)
        eager()
        assert_same_results(f"graph {seed}", eager, call)
