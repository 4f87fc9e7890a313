# SPDX-License-Identifier: Apache-2.0
"""cula.dist: N ranks = 1 rank, for every algorithm and every way of cutting, and what happens when it fails.

The ranks are processes: over gloo, or with --device cuda over NCCL with a GPU each. This process only
compares, on the CPU. There the ranks also compute everything once in float64 by the reference, which then has
to agree to 1e-12.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d

from cula.conv import causal_conv1d_fn
from cula_testing import passes
from cula_testing.cases import Case, make
from cula_testing.compare import assert_accurate, assert_exact, assert_same_bits
from cula_testing.ranks import RankError, Ranks, need_gpus
from cula_testing.strategies import cases

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("scan", "ring")

# Packed: empty sequences first, in between and last, one over all of four ranks, others whole.
PACKED = (0, 70, 0, 300, 5, 20, 0)
LAYOUTS = {
    "two ranks": ((200, 200), False, (0, 37, 200)),
    "three ranks": ((200, 200), False, (0, 100, 164, 200)),
    "an empty rank in between": ((200,), False, (0, 37, 130, 130, 200)),
    "empty ranks at the ends": ((200,), False, (0, 0, 65, 200, 200)),
    "fewer tokens than ranks": ((2,), False, (0, 1, 1, 2, 2)),
    "packed over four": (PACKED, True, (0, 100, 200, 300, 395)),
    "packed, cut at a border": (PACKED, True, (0, 70, 370, 395)),
    "packed, empty ranks": (PACKED, True, (0, 0, 80, 80, 395)),
    "packed, two ranks": (PACKED, True, (0, 372, 395)),
}


def one_rank(case: Case) -> dict[str, passes.Result]:
    inputs = make(case)
    return {
        "oracle": passes.prefill(inputs.double(), backend="reference"),
        "naive": passes.prefill(inputs, backend="reference:naive"),
    }


def assert_same(case: Case, expected: dict[str, passes.Result], **found: torch.Tensor) -> None:
    """By the error rule, or exactly where it was computed in float64."""
    for name, x in found.items():
        oracle, naive = getattr(expected["oracle"], name), getattr(expected["naive"], name)
        if x.dtype == torch.float64:
            assert_exact(name, x, oracle)
        else:
            assert_accurate(name, x, oracle, naive, case.dtype)


def joined(answers: list[tuple]) -> dict[str, torch.Tensor]:
    """All tokens, and the last rank's final states."""
    return {"o": torch.cat([o for o, _ in answers], 1), "final_state": answers[-1][1]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_split_of_the_tokens_is_one_rank(algorithm, layout, pools, precisions):
    lengths, packed, splits = LAYOUTS[layout]
    case = Case(algorithm, lengths, packed=packed, value_heads=4, value_dim=32)
    expected, ranks = one_rank(case), pools(len(splits) - 1)
    for method in METHODS:
        for exact in precisions:
            answers = ranks.call("split", case, splits, exact, {"method": method})
            assert all(final is None for _, final in answers[:-1])
            assert_same(case, expected, **joined(answers))


@pytest.mark.parametrize("how", ["split_as_on_gpus", "split_by_all_gather"])
@pytest.mark.parametrize("layout", ["two ranks", "an empty rank in between", "empty ranks at the ends"])
def test_scans_that_few_ranks_on_cpus_would_not_make(algorithm, layout, how, pools, precisions):
    lengths, packed, splits = LAYOUTS[layout]
    case = Case(algorithm, lengths, packed=packed, value_heads=4, value_dim=32)
    for exact in precisions:
        answers = pools(len(splits) - 1).call(how, case, splits, exact, {"method": "scan"})
        assert_same(case, one_rank(case), **joined(answers))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("key_dim", [1, 3])
def test_a_scan_of_few_channels(algorithm, key_dim, packed, pools, precisions):
    case = Case(algorithm, (20,), packed=packed, key_dim=key_dim, value_dim=5)
    for exact in precisions:
        answers = pools(3).call("split", case, (0, 7, 15, 20), exact, {"method": "scan"})
        assert_same(case, one_rank(case), **joined(answers))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_more_values_than_a_kernel_takes(algorithm, method, packed, pools, precisions):
    case = Case(algorithm, (20,), packed=packed, key_dim=8, value_dim=300)
    for exact in precisions:
        answers = pools(3).call("split", case, (0, 7, 15, 20), exact, {"method": method})
        assert_same(case, one_rank(case), **joined(answers))


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_rows(method, pools):
    inputs = [torch.zeros(0, 4, 2, 8) for _ in range(4)]
    answers = pools(3).call("without_rows", *inputs, torch.zeros(0, 4, 2), method)
    assert [o.shape for o in answers] == 3 * [(0, 4, 2, 8)]


@pytest.mark.parametrize("layout", ["two ranks", "packed, two ranks"])
def test_nothing_waits_for_the_device(layout, pools, kind):
    if kind == "cpu":
        pytest.skip("there is no device to wait for")
    lengths, packed, splits = LAYOUTS[layout]
    case = Case("kda", lengths, packed=packed)
    for method in METHODS:
        answers = pools(2).call("split_without_waiting", case, splits, {"method": method})
        assert_same(case, one_rank(case), **joined(answers))


@settings(max_examples=6)
@given(data=st.data())
def test_the_whole_contract(algorithm, pools, kind, data):
    # What Level 1 has no words for is left out.
    gate = {} if algorithm in ("kda", "gdn") else {"gate": "log_decay"}
    fixed = {"pool": False, "beta_per_value": False, "A_log": True, "head_decay": False, **gate}
    if kind == "cuda":
        fixed["backend"] = ""  # this process would name one for the CPU
    case = data.draw(cases(algorithm, **fixed))
    borders = data.draw(st.lists(st.integers(0, case.tokens), min_size=3, max_size=3))
    method = data.draw(st.sampled_from([*METHODS, None]))
    answers = pools(4).call("split", case, (0, *sorted(borders), case.tokens), False, {"method": method})
    assert_same(case, one_rank(case), **joined(answers))


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("decay", ["extreme", "mixed"])
def test_raw_gates_and_collinear_keys(gate, decay, pools):
    more = {"gate": gate, "decay": decay, "keys": "collinear", "beta_is_logit": True, "qk_l2norm": True}
    case = Case("kda", (150,), k_first=True, **more)
    for method in METHODS:
        answers = pools(3).call("split", case, (0, 20, 101, 150), False, {"method": method})
        assert_same(case, one_rank(case), **joined(answers))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", ["last", "all", "end"])
def test_where_final_states_go(packed, where, pools, exact):
    lengths = PACKED if packed else (395,)
    splits = (0, 100, 200, 395)
    case = Case("gdn", lengths, packed=packed)
    expected = one_rank(case)
    answers = pools(3).call("split", case, splits, exact, {"final_state_on": where})
    finals = [final for _, final in answers]
    if where == "end" and packed:
        assert_same(case, expected, final_state=sum(finals))
        ends = torch.tensor(lengths).cumsum(0)
        for rank, final in enumerate(finals):
            here = torch.tensor([next(r for r in range(3) if splits[r + 1] >= end) == rank for end in ends])
            assert (final.flatten(1).any(1) == here).all()
        return
    for final in finals[:-1]:
        assert (final is None) == (where != "all")
    for final in finals if where == "all" else finals[-1:]:
        assert_same(case, expected, final_state=final)


@pytest.mark.parametrize("packed", [False, True])
def test_no_final_state_and_no_initial_state(packed, pools, exact):
    case = Case("kda", PACKED if packed else (395,), packed=packed, state=False)
    for method in METHODS:
        options = {"output_final_state": False, "method": method}
        answers = pools(2).call("split", case, (0, 200, 395), exact, options)
        assert [final for _, final in answers] == [None, None]
        assert_same(case, one_rank(case), o=torch.cat([o for o, _ in answers], 1))


@pytest.mark.parametrize("method", METHODS)
def test_states_may_lie_k_first(method, pools, exact):
    case = Case("kda", (100,), value_dim=32)
    k_first = make(case).initial_state.transpose(-1, -2).to(torch.float64 if exact else torch.float32)
    options = {"state_v_first": False, "initial_state": k_first, "method": method}
    answers = pools(2).call("split", case, (0, 30, 100), exact, options)
    assert_same(case, one_rank(case), final_state=answers[-1][1].transpose(-1, -2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_go_where_they_are_asked_to_go(method, dtype, pools):
    case = Case("kda", (100, 100), value_dim=32)
    for rank, filled in enumerate(pools(2).call("into", case, (0, 30, 100), dtype, {"method": method})):
        assert filled.dtype == dtype
        assert filled.shape[1] == (30, 70)[rank]
        oracle, naive = (
            one_rank(case)[kind].o[:, (0, 30)[rank] : (30, 100)[rank]] for kind in ("oracle", "naive")
        )
        assert_accurate("o", filled, oracle, naive, case.dtype)


def test_one_rank_is_a_prefill(pools):
    """A group of one, and of a mesh of which the other dimension has all ranks."""
    case = Case("kda", (100,), heads=2, value_heads=4)
    for method in (*METHODS, None):
        for o, final in pools(2).call("mesh", case, 2, (0, 100), False, {"method": method}):
            assert_same(case, one_rank(case), o=o, final_state=final)


def test_a_write_strength_per_value_goes_around(pools, exact):
    case = Case("kda", (100,), beta_per_value=True)
    answers = pools(3).call("split", case, (0, 30, 70, 100), exact, {})
    assert_same(case, one_rank(case), **joined(answers))
    for answer in pools(3).answers("split", case, (0, 30, 70, 100), exact, {"method": "scan"}):
        assert isinstance(answer, RankError)
        assert "method must be ring, since a write strength per value channel" in answer.message


@pytest.mark.parametrize("splits", [(0, 2, 5, 7), (0, 0, 7, 7)])
@pytest.mark.parametrize("where", [None, "last", "all"])
def test_whole_sequences_per_rank(algorithm, splits, where, pools, exact):
    case = Case(algorithm, PACKED, packed=True)
    answers = pools(3).call("complete", case, splits, exact, {"final_state_on": where})
    finals, expected = [final for _, final in answers], one_rank(case)
    assert_same(case, expected, o=torch.cat([o for o, _ in answers], 1))
    if where is None:
        assert_same(case, expected, final_state=torch.cat(finals))
    else:
        assert [final is None for final in finals] == [where == "last"] * 2 + [False]
        assert_same(case, expected, final_state=finals[-1])


@pytest.mark.parametrize("given", ["local", "full", "replicated"])
def test_heads_over_ranks(algorithm, given, pools, precisions):
    case = Case(algorithm, (100, 100), heads=4, value_heads=8)
    expected = one_rank(case)
    for exact in precisions:
        outputs, finals = zip(*pools(2).call("heads", case, exact, given, {}), strict=True)
        assert_same(case, expected, o=torch.cat(outputs, 2), final_state=torch.cat(finals, 1))
        for o, final in pools(2).call("heads", case, exact, given, {"gather_output": True}):
            assert_same(case, expected, o=o, final_state=final)


def test_fewer_query_heads_than_ranks(pools, exact):
    case = Case("gdn", (60,), heads=2, value_heads=8, gate="softplus")
    expected = one_rank(case)
    for what in ("full", "replicated"):
        for o, final in pools(4).call("heads", case, exact, what, {"gather_output": True}):
            assert_same(case, expected, o=o, final_state=final)


def test_parameters_of_all_heads_beside_local_heads(pools, exact):
    case = Case("kda", (60,), heads=4, value_heads=4, gate="bounded")
    full = make(case).double() if exact else make(case)
    options = {"A_log": full.A_log, "dt_bias": full.dt_bias, "initial_state": full.initial_state}
    for o, final in pools(2).call("heads", case, exact, "local", {**options, "gather_output": True}):
        assert_same(case, one_rank(case), o=o, final_state=final)


def test_a_rank_writes_its_heads_of_a_pool(pools, exact):
    case = Case("kda", (30, 20, 0), packed=True, heads=4, value_heads=4, pool=True)
    before = make(case)
    oracle, naive = before.double(), before.map(torch.clone)
    passes.prefill(oracle, backend="reference", in_place=True)
    passes.prefill(naive, backend="reference:naive", in_place=True)
    slots = before.initial_state_indices.long()
    for rank, found in enumerate(pools(2).call("heads_in_pool", case, exact)):
        own, other = (slice(2, 4), slice(0, 2)) if rank else (slice(0, 2), slice(2, 4))
        assert_same_bits("others' heads", found[:, other], before.initial_state.to(found.dtype)[:, other])
        results = (x[slots][:, own] for x in (found, oracle.initial_state, naive.initial_state))
        assert_accurate("own heads", *results, case.dtype)


@pytest.mark.parametrize("packed", [False, True])
def test_heads_and_tokens_over_a_mesh(algorithm, packed, pools, precisions):
    case = Case(algorithm, PACKED if packed else (395,), packed=packed, heads=2, value_heads=4)
    expected = one_rank(case)
    for method in METHODS:
        for exact in precisions:
            answers = pools(4).call("mesh", case, 2, (0, 123, 395), exact, {"method": method})
            for first, second in (answers[:2], answers[2:]):
                assert_same(case, expected, o=torch.cat([first[0], second[0]], 1), final_state=first[1])
                assert_same_bits("final_state", first[1], second[1])


@pytest.mark.parametrize("lengths", [(176,), (10, 130, 36), (44, 44, 20, 68)])
@pytest.mark.parametrize("algorithm", ["kda", "gdn", "gdp", "delta_product", "rwkv7"])
def test_drop_ins_under_a_context_of_fla(algorithm, lengths, pools):
    case = Case(algorithm, lengths, packed=True, state=False, value_heads=4, decay="slow", qk_l2norm=True)
    if algorithm == "rwkv7":
        case = case.but(heads=4, qk_l2norm=False)
    answers = pools(4).call("in_context", case, {})
    assert_same(case, one_rank(case), o=torch.cat([o for o, _ in answers], 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"post_num_ranks": 2}, "chunk_kda: cp_context must be that of rank"),
        ({"pre_num_ranks": -1}, "chunk_kda: cp_context must be that of rank"),
        ({"group": None}, "chunk_kda: cp_context must have group"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must end at or before the 4 tokens"),
    ],
)
def test_contexts_of_other_ranks(changes, message, pools, kind):
    if kind == "cuda" and "cu_seqlens" in changes:
        pytest.skip("reading what lies on the device would mean waiting for it")
    for answer in pools(2).answers("in_context", Case("kda", (8,), packed=True, state=False), changes):
        assert (answer.kind, message in answer.message) == ("ValueError", True)


@pytest.mark.parametrize("given", ["group", "mesh", "name", "number"])
def test_what_counts_as_a_group(given, pools):
    assert pools(2).call("grouped", given) == [[2, 0], [2, 1]]


SMALL = Case("kda", (8,), state=False)
WRONG = {
    "sp_size": ("cp", {"sp_size": 3}, "ValueError", "sp_size must be the size of sp_group, 2, got 3"),
    "sp_rank": ("cp", {"sp_rank": 7}, "ValueError", "sp_rank must be this process's rank in sp_group"),
    "no group": ("cp", {"sp_group": None}, "ValueError",
                 "sp_group must be a process group or a mesh dimension"),
    "a name": ("cp", {"sp_group": "cp"}, "TypeError",
               "sp_group must be a process group or a mesh dimension, got str"),
    "size type": ("cp", {"sp_size": True}, "TypeError", "sp_size must be of type int, got bool"),
    "a mesh": ("cp", {"sp_group": "a mesh of two dimensions"}, "ValueError",
               "must be a mesh of one dimension"),
    "others": ("cp", {"sp_group": "a group of others"}, "ValueError", "sp_group must contain this process"),
    "nvshmem": ("cp", {"nvshmem_backend": True}, "NotImplementedError", "nvshmem_backend"),
    "method": ("cp", {"method": "tree"}, "ValueError", "method must be None, scan or ring, got 'tree'"),
    "mode": ("cp", {"sp_mode": "whole"}, "ValueError", "sp_mode must be split or complete, got 'whole'"),
    "complete": ("cp", {"sp_mode": "complete"}, "ValueError",
                 "cu_seqlens must be given with sp_mode complete"),
    "final": ("cp", {"final_state_on": "first"}, "ValueError",
              "final_state_on must be None, last, all or end"),
    "splits": ("cp", {"sp_splits": (0, 8)}, "ValueError",
               "sp_splits must be 3 ascending borders from 0, got [0, 8]"),
    "shares": ("cp", {"sp_splits": (0, 5, 16)}, "ValueError", "sp_splits must give rank"),
    "pool": ("cp", {"state_pool": torch.zeros(1)}, "ValueError", "state_pool is not supported"),
    "k": ("cp", {"k": torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16)}, "ValueError", "k must have"),
    "tokens": ("cp", {"g": torch.zeros(1, 9, 2, 64)}, "ValueError",
               "g must have q's 8 tokens, got [1, 9, 2, 64]"),
    "cp out": ("cp", {"out": torch.zeros(1, 8, 2, 3)}, "ValueError",
               "out must have v's shape, [1, 8, 2, 64], got"),
    "out type": ("cp", {"out": torch.zeros(1, 8, 2, 64).half()}, "ValueError", "out must have dtype"),
    "scale": ("cp", {"scale": "small"}, "TypeError", "scale must be of type float, got str"),
    "gate": ("cp", {"use_gate_in_kernel": True}, "ValueError", "A_log"),
    "state type": ("cp", {"initial_state": torch.zeros(1, 2, 64, 64).int()}, "ValueError", "initial_state"),
    "state kind": ("cp", {"initial_state": 3}, "TypeError",
                   "initial_state must be a tensor or None, got int"),
    "unknown": ("cp", {"chunks": 3}, "TypeError",
                "cula_kda_cp() got an unexpected keyword argument 'chunks'"),
    "initial": ("cp", {"initial_state": torch.zeros(1, 2, 3, 4)}, "ValueError",
                "initial_state must have shape [1, 2,"),
    "cu": ("cp", {"cu_seqlens": torch.tensor([0, 17])}, "ValueError",
           "cu_seqlens must end at or before the 16 tokens"),
    "cu order": ("cp", {"cu_seqlens": torch.tensor([0, 9, 4])}, "ValueError",
                 "cu_seqlens must ascend from 0"),
    "cp flag": ("cp", {"state_v_first": "no"}, "TypeError", "state_v_first must be of type bool, got str"),
    "cp state": ("cp", {"output_final_state": "no"}, "TypeError",
                 "output_final_state must be of type bool, got str"),
    "tp_size": ("tp", {"tp_size": 4}, "ValueError", "tp_size must be the size of tp_group, 2, got 4"),
    "heads": ("tp", {"g": torch.zeros(1, 8, 3, 64)}, "ValueError",
              "g must have 2 heads, this rank's, or 4, all, got"),
    "A_log": ("tp", {"A_log": torch.zeros(3)}, "ValueError",
              "A_log must have values for 2 heads, this rank's, or 4"),
    "v heads": ("tp", {"full_inputs": True, "v": torch.zeros(1, 8, 3, 64)}, "ValueError",
                "v must have heads for"),
    "q heads": ("tp", {"full_qk": True, "q": torch.zeros(1, 8, 3, 64)}, "ValueError",
                "q must have a number of heads"),
    "out": ("tp", {"gather_output": True, "out": torch.zeros(1)}, "ValueError", "out must be left out"),
    "hybrid": ("tp_cp", {"tp_group": None, "sp_group": None}, "ValueError",
               "tp_group must be a process group"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_raise_on_every_rank(wrong, pools, kind):
    suffix, changes, error, message = WRONG[wrong]
    if kind == "cuda" and wrong in ("cu", "cu order"):
        pytest.skip("reading what lies on the device would mean waiting for it")
    for method in METHODS if suffix == "cp" and "method" not in changes else (None,):
        also = {"method": method, **changes} if method else changes
        for answer in pools(2).answers("arguments", SMALL, suffix, also):
            assert isinstance(answer, RankError), f"a rank raised nothing, {error} was expected"
            assert answer.kind == error
            assert message in answer.message


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_raises_does_not_leave_the_others_waiting(method, tmp_path, kind):
    need_gpus(kind, 3)
    ranks = Ranks(3, tmp_path, kind, seconds=20)
    try:
        ranks.call("arguments", SMALL, "cp", {"method": method})
        begin = time.monotonic()
        bad = {"initial_state": torch.zeros(1, 1, 1, 1), "only": 1, "method": method}
        answers = ranks.answers("arguments", SMALL, "cp", bad, "then leave")
        assert time.monotonic() - begin < 60
        assert (answers[1].kind, "initial_state must have shape" in answers[1].message) == (
            "ValueError",
            True,
        )
        # The first rank has nothing to wait for but its messages to be taken, which NCCL does ahead of the
        # receiver.
        failed = [answer for answer in (answers[0], answers[2]) if isinstance(answer, RankError)]
        assert answers[2] in failed
        assert len(failed) == 2 or method == "ring" or kind == "cuda"
        assert all(answer.kind in ("RuntimeError", "DistBackendError", "exit") for answer in failed)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("lengths", "packed", "splits", "width"),
    [
        ((20,), False, (0, 5, 12, 20), 4),
        ((20,), False, (0, 1, 2, 20), 4),
        ((20,), False, (0, 6, 6, 20), 4),
        ((20,), False, (0, 2, 9, 20), 2),
        ((5, 0, 6, 9), True, (0, 6, 13, 20), 4),
        ((5, 15), True, (0, 5, 7, 20), 4),
        ((2, 2, 1), True, (0, 3, 5, 20), 4),
    ],
)
def test_boundary_tokens_of_a_convolution(lengths, packed, splits, width, pools):
    """A causal convolution of the whole, sequence by sequence, is that of each rank's pieces, the first
    behind the boundary tokens. Numbers are small integers, so sums are exact."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-9, 9, shape, generator=generator).float() for shape in ((1, splits[-1], 3), (3, width))
    )
    sequence_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    def convolve(before: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_fn(piece.mT, weight, initial_states=before.mT).mT

    none = torch.zeros(1, width - 1, 3)
    sequences = (piece for piece in x[:, : sum(lengths)].split(lengths, 1) if piece.numel())
    whole = torch.cat(
        [conv1d(torch.cat([none, each], 1).mT, weight[:, None], groups=3).mT for each in sequences], 1
    )
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0) if packed else None
    for rank, boundary in enumerate(pools(3).call("boundary", x, cu_seqlens, splits, width)):
        begin, end = splits[rank], min(splits[rank + 1], sum(lengths))
        if begin >= end:
            continue
        sizes = sequence_of[begin:end].unique_consecutive(return_counts=True)[1].tolist()
        first, *others = x[:, begin:end].split(sizes, 1)
        found = torch.cat([convolve(boundary, first), *(convolve(none, piece) for piece in others)], 1)
        assert torch.equal(found, whole[:, begin:end])


def test_wrong_widths_of_a_convolution(pools):
    for answer in pools(2).answers("boundary", torch.zeros(1, 8, 1), None, (0, 4, 8), 1):
        assert (answer.kind, answer.message) == ("ValueError", "width must be at least 2, got 1")


def test_the_example_runs(kind):
    """Every kind of parallelism that it shows, a pipeline among them, beside one rank."""
    need_gpus(kind, 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        str(ROOT / "examples" / "context_parallel.py"),
        "--tokens",
        "500",
        "--heads",
        "2",
        "--dim",
        "64",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in (*METHODS, "packed sequences", "half the heads", "pipeline of 2 layers"):
        assert what in done.stdout
