# SPDX-License-Identifier: Apache-2.0
"""The suite of few heads: its shapes and gates, what cuDNN is asked for, means, and a small run from end to
end."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import few_heads_tables
import result_tables
from cula.bench import cpu, eager
from cula.bench.impls import OURS, Impl, inputs_of
from cula_testing import cpu_as_gpu, cudnn_stand_in
from cula_testing.cases import FEW_HEADS, FEW_HEADS_OF_THE_MEAN, Case

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import __main__ as main  # noqa: E402  (once ROOT is on the path)
from bench import peers, plot, results, suites  # noqa: E402  (likewise)
from bench.accuracy import Oracle  # noqa: E402  (likewise)

pytestmark = pytest.mark.cpu_only("about the benchmark's host side")

SUITE = suites.SUITES["prefill_few_heads"]


@pytest.fixture(autouse=True)
def _no_gradients():
    """As the benchmark runs."""
    with torch.no_grad():
        yield


@pytest.fixture
def cudnn(monkeypatch) -> dict[str, Impl]:
    cudnn_stand_in.install(monkeypatch, peers.CUDNN_PLAN)
    return {impl.name: impl for impl in (peers.CUDNN, *peers.cudnn_forms())}


def small(case: Case, tokens: int = 48) -> Case:
    count = min(case.sequences, 2)
    heads = 2 + (case.heads > 12)
    return case.but(lengths=(tokens // count,) * count, heads=heads, value_heads=heads)


def test_a_case_is_what_its_name_says():
    for entry in SUITE.entries:
        case = entry.case
        shape, suffix = (
            entry.name.rsplit("-", 1) if entry.name.endswith(("-slow", "-mixed")) else (entry.name, "")
        )
        assert shape == f"T{sum(case.lengths)}-H{case.heads}-N{case.sequences}"
        assert case.decay == {"": "forgetting", "slow": "lasting", "mixed": "half_lasting"}[suffix]
        assert len(set(case.lengths)) == 1
        assert (case.packed, case.key_dim, case.value_dim) == (case.sequences > 1, 128, 128)
        assert (case.algorithm, case.gate, case.dtype) == ("kda", "bounded", torch.bfloat16)
    assert len(SUITE.entries) == 3 * 14
    assert not any(SUITE.name in names for names in suites.GROUPS.values())
    assert [len(names) for names in SUITE.means] == [len(FEW_HEADS_OF_THE_MEAN)] * 3 == [10] * 3


def log_gates(decay: str) -> torch.Tensor:
    """[T, HV, K]"""
    case = FEW_HEADS["gates of mean -2.5"]["T2048-H12-N1"].but(decay=decay, heads=4, value_heads=4)
    return eager.log_decay(inputs_of("prefill", case, "cpu"))[0]


def test_the_gates_forget_last_or_do_both():
    forgets, lasts, both = (log_gates(decay) for decay in ("forgetting", "lasting", "half_lasting"))
    assert forgets.mean().item() == pytest.approx(-2.5, abs=0.1)
    torch.testing.assert_close(both[:, ::2], forgets[:, ::2], atol=0, rtol=0)
    torch.testing.assert_close(both[:, 1::2], lasts[:, 1::2], atol=0, rtol=0)
    bound = -64 * math.log(2)
    windows = forgets.unfold(0, 40, 40).sum(-1)
    assert windows.amax() < bound  # every channel of every head, in any 40 tokens
    assert lasts.sum(0).amax(-1).amin() > bound  # some channel of every head, after all 2,048 tokens


def test_what_is_compared(monkeypatch):
    monkeypatch.setattr(suites, "gpu_impls", lambda: [OURS, peers.CUDNN])
    monkeypatch.setattr(peers, "cudnn_forms", lambda: [impl for _, impl in peers.CUDNN_FORMS])
    for entry in (SUITE.entries[0], SUITE.entries[-1]):
        assert [impl.name for impl in SUITE.impls_of(entry)] == [
            "cula",
            "cula:sm90:joined",
            "cudnn",
            "cudnn:given",
            "cudnn:whole",
        ]


@pytest.mark.parametrize("shape", ["T2048-H12-N1", "T8192-H12-N4"])
def test_cudnn_is_given_more_or_less_for_the_same_result(cudnn, monkeypatch, shape):
    inputs = inputs_of("prefill", small(FEW_HEADS["slow gates"][f"{shape}-slow"]), "cpu")
    oracle = Oracle("prefill", inputs)
    module, asked = sys.modules[peers.CUDNN_MODULE], []
    attention = module.kimi_delta_attention

    def listening(*tensors, **named):
        asked.append({"q": tensors[0], "g": tensors[3], **named})
        return attention(*tensors, **named)

    monkeypatch.setattr(module, "kimi_delta_attention", listening)
    for impl in cudnn.values():
        assert max(oracle.errors(*impl.bound("prefill", inputs)())) < 1e-2
    assert list(cudnn) == ["cudnn", "cudnn:given", "cudnn:whole"]
    assert ["a_log" in call for call in asked] == [True, False, True]
    assert [torch.equal(call["q"], inputs.q.flatten(0, 1)) for call in asked] == [True, False, True]
    assert inputs.g.dtype == torch.bfloat16

    # What is left to others is done once, before the clock starts; the whole call widens in every call.
    for name, once in (("cudnn", True), ("cudnn:given", True), ("cudnn:whole", False)):
        asked.clear()
        call = cudnn[name].bound("prefill", inputs)
        call(), call()
        assert (asked[0]["g"].data_ptr() == asked[1]["g"].data_ptr()) is once


def row(impl: str, case: str, gpu_ms: float | None) -> dict:
    return {"impl": impl, "case": case, "gpu_ms": gpu_ms, "call_ms": 8.0, "panel": "slow gates"}


def test_a_mean_is_of_all_its_cases():
    rows = [row("cula", "a", 1.0), row("cula", "b", 4.0), row("cula", "c", 100.0)]
    rows += [row("fla", "a", 2.0), row("fla", "c", 9.0), row("cudnn", "a", 2.0), row("cudnn", "b", None)]
    assert results.means_of(rows, (frozenset("ab"),)) == [
        {"panel": "slow gates", "impl": "cula", "cases": 2, "ms": pytest.approx(2.0)},
        {"panel": "slow gates", "impl": "cudnn", "cases": 2, "ms": pytest.approx(4.0)},
    ]
    assert results.means_of(rows, (frozenset("abd"),)) == []
    assert results.means_of([], (frozenset("ab"),)) == []


@pytest.fixture
def _as_a_gpu(monkeypatch):
    """This CPU, as if it were a GPU."""
    cpu_as_gpu.install(monkeypatch, last_level_cache_bytes=lambda: 1)


@pytest.mark.usefixtures("_as_a_gpu")
def test_a_small_run_from_end_to_end(monkeypatch, tmp_path, cudnn, capsys):
    """Ours goes by FLA's name, too. FLA lacks one shape of the last kind of gates, and so a mean."""

    def not_the_last(pass_name: str, case: Case) -> bool:
        return OURS.takes(pass_name, case) and not (case.decay == "half_lasting" and case.heads == 3)

    names = {"T1024-H4-N1", "T8192-H12-N4", "T8192-H16-N1", "T131072-H8-N1"}
    chosen = [
        entry for entry in SUITE.entries if entry.name.removesuffix("-slow").removesuffix("-mixed") in names
    ]
    tiny = dataclasses.replace(
        SUITE,
        entries=tuple(dataclasses.replace(entry, case=small(entry.case)) for entry in chosen),
        impls=lambda: [OURS, Impl("fla", OURS.bind, not_the_last), *cudnn.values()],
        device=cpu,
        means=tuple(frozenset(entry.name for entry in chosen[i : i + 3]) for i in (0, 4, 8)),
    )
    run = main.Run(Namespace(case="", impl="", quick=True, output=tmp_path))
    run.suite(tiny)
    assert not run.failed
    (path,) = tmp_path.glob("*/prefill_few_heads.json")
    found = json.loads(path.read_text())
    assert len(found["cases"]) == 12 * 5 - 1
    assert all(0 < row["rel_err_out"] < 2e-2 for row in found["cases"])
    assert "refused" not in found
    means = {(mean["panel"], mean["impl"]): mean for mean in found["means"]}
    assert len(means) == 3 * 5 - 1
    assert ("half of the heads slow", "fla") not in means
    times = [each["gpu_ms"] for each in found["cases"] if each["impl"] == "cula"]
    mean = math.exp(sum(map(math.log, times[:3])) / 3)
    assert means["gates of mean -2.5", "cula"] == {
        "panel": "gates of mean -2.5",
        "impl": "cula",
        "cases": 3,
        "ms": pytest.approx(mean),
    }
    assert f"geometric mean of 3, gates of mean -2.5: cula {mean:24.4f} ms" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    plot.main()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    lines = few_heads_tables.few_heads()
    assert sum(line.startswith("| gates of mean -2.5 | T") for line in lines) == 4
    assert f"| gates of mean -2.5, 3 shapes | {1e3 * mean:.1f} |" in "\n".join(lines)
    (last,) = (line for line in lines if line.startswith("| half of the heads slow, 3 shapes"))
    assert last.split(" | ")[2:3] == ["-"]
    assert any(line.startswith("![prefill few heads, times by shape](") for line in lines)
    assert lines[-1].startswith("Our error is no larger than FLA's in")


def test_without_results(monkeypatch, tmp_path):
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert few_heads_tables.few_heads() == few_heads_tables.NOT_YET
