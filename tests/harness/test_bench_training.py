# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training: gradients of every implementation as those of the inputs, peers that leave
something to others or refuse a case, results in parts, and the tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import result_tables
import training_tables
from cula.bench import cost, cpu, training
from cula.bench.impls import OURS, Impl, inputs_of
from cula_testing import cpu_as_gpu, cudnn_stand_in, passes
from cula_testing.cases import CPU_HEADLINES, TRAINING, TRAINING_PASSES, Case, Inputs
from cula_testing.process import run_python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import __main__ as main  # noqa: E402  (once ROOT is on the path)
from bench import first, peers, plot, results, suites  # noqa: E402  (likewise)
from bench.accuracy import GradientOracle  # noqa: E402  (likewise)
from bench.impls import cpu_impls  # noqa: E402  (likewise)

pytestmark = pytest.mark.cpu_only("about the benchmark's host side")


@pytest.fixture(autouse=True)
def _no_gradients():
    """As the benchmark runs."""
    with torch.no_grad():
        yield


def small(case: Case, *lengths: int) -> Case:
    return case.but(lengths=lengths or (96,), packed=len(lengths) > 1, heads=2, value_heads=2)


def test_a_case_is_what_its_name_says():
    for op, cases in TRAINING.items():
        for name, case in cases.items():
            tokens, heads, *words = name.split("-")
            assert (f"T{sum(case.lengths)}", case.algorithm) == (tokens, op)
            assert heads in (f"H{case.heads}", str(case.heads))
            if words and words[0].startswith("N"):
                assert words[0] == f"N{case.sequences}"
            width = 64 if "K64" in words else 128
            assert (case.key_dim, case.value_dim, case.dtype) == (width, width, torch.bfloat16)
            assert not case.state


def test_the_suites_of_training():
    assert suites.GROUPS["training"] == tuple(f"{op}_{name}" for op in TRAINING for name in TRAINING_PASSES)
    for name in suites.GROUPS["training"]:
        suite = suites.SUITES[name]
        assert suite.trains
        assert {entry.name: entry.case for entry in suite.entries} == TRAINING[name.partition("_")[0]]
    assert {"cpu_backward", "cpu_train"} <= set(suites.GROUPS["cpu"])
    entry = suites.SUITES["cpu_train"].entry("kda", "T4096-H16")
    assert entry.case == CPU_HEADLINES["kda", "train"]["T4096-H16"]
    assert [impl.name for impl in suites.SUITES["cpu_train"].impls_of(entry)] == ["cula", "eager_chunk"]


@pytest.mark.parametrize("pass_name", TRAINING_PASSES)
@pytest.mark.parametrize("op", TRAINING)
def test_gradients_are_those_of_the_oracle(op, pass_name):
    inputs = inputs_of(pass_name, small(next(iter(TRAINING[op].values()))), "cpu")
    oracle, wanted = GradientOracle(inputs), training.names(inputs)
    assert "decay" not in wanted
    (chunk,) = (impl for impl in cpu_impls() if impl.name == "eager_chunk")
    for impl in (OURS, chunk):
        call = impl.bound(pass_name, inputs)
        for made in (call(), call()):
            assert list(made) == wanted
            found = oracle.errors(made)
            assert list(found) == wanted
            assert max(found.values()) < 1e-2
        assert not any(getattr(inputs, name).requires_grad for name in wanted)


def test_packed_sequences_have_gradients_of_their_own():
    inputs = inputs_of("train", small(TRAINING["kda"]["T8192-H12-N4"], 40, 70), "cpu")
    assert max(GradientOracle(inputs).errors(OURS.gradients("train", inputs)).values()) < 1e-2


def test_the_error_of_a_gradient_is_seen():
    inputs = inputs_of("train", small(TRAINING["gla"]["T8192-H32"]), "cpu")
    made = OURS.gradients("train", inputs)
    made["k"] = 1.5 * made["k"]
    found = GradientOracle(inputs).errors(made)
    assert found["k"] == pytest.approx(0.5, rel=0.01)
    assert max(value for name, value in found.items() if name != "k") < 1e-2


def test_what_a_step_costs():
    case = TRAINING["kda"]["T8192-H64"].but(lengths=(64,), heads=1, value_heads=1)
    backward = cost.flops("backward", case)
    assert 30e6 < backward < 34e6  # about three forward passes
    assert cost.flops("train", case) == cost.flops("prefill", case) + backward
    inputs = inputs_of("train", case, "cpu")
    row = 64 * 128 * 2  # q, k, v, g, o and their gradients
    rest = 64 * 2 + 4 + 128 * 4  # beta, A_log, dt_bias
    assert cost.moved_bytes("backward", inputs) == 9 * row + 2 * rest
    assert cost.moved_bytes("train", inputs) == 14 * row + 3 * rest


@pytest.fixture
def cudnn(monkeypatch) -> Impl:
    cudnn_stand_in.install(monkeypatch, peers.CUDNN_PLAN)
    return peers.CUDNN


@pytest.mark.parametrize("lengths", [(96,), (40, 70)], ids=["dense", "packed"])
def test_what_cudnn_leaves_to_others_is_done_before_and_differentiated_after(cudnn, lengths):
    case = small(TRAINING["kda"]["T8192-H64"], *lengths)
    for pass_name in TRAINING_PASSES:
        inputs = inputs_of(pass_name, case, "cpu")
        assert list(cudnn.bound(pass_name, inputs)()) == ["q", "k", "v", "g", "beta"]
        found = cudnn.gradients(pass_name, inputs)
        assert list(found) == training.names(inputs)
        assert all(found[name].dtype == getattr(inputs, name).dtype for name in found)
        assert max(GradientOracle(inputs).errors(found).values()) < 2e-2


def test_cudnn_has_norms_gate_and_sigmoid_in_its_forward_pass(cudnn):
    inputs = inputs_of("prefill", small(TRAINING["kda"]["T8192-H64"], 40, 70), "cpu")
    o, states = cudnn.bound("prefill", inputs)()
    wanted = passes.prefill(inputs, backend="reference")
    torch.testing.assert_close(o, wanted.o, atol=0.02, rtol=0.02)
    torch.testing.assert_close(states, wanted.final_state, atol=1e-3, rtol=1e-3)


def test_what_cudnn_takes(cudnn):
    case = TRAINING["kda"]["T8192-H64"]
    assert all(cudnn.takes(name, case) for name in ("prefill", *TRAINING_PASSES))
    assert not cudnn.takes("decode", case)
    for other in (case.but(gate="softplus"), case.but(value_heads=128), case.but(key_dim=64)):
        assert not cudnn.takes("prefill", other)
    assert not cudnn.takes("train", TRAINING["gla"]["T8192-H32"])


def test_fla_is_told_to_recompute_nothing(monkeypatch):
    asked = []

    def chunk_kda(q, k, v, g, beta, *, cu_seqlens, dt_bias, **named):
        asked.append(named.pop("disable_recompute", False))
        assert (dt_bias.ndim, cu_seqlens.dtype) == (1, torch.int64)
        assert not {"output_final_state", "initial_state"} & set(named)
        return v * dt_bias.sum() * g.sum() * beta.sum() * named["A_log"].sum() + q + k, None

    module = ModuleType("fla.ops.kda")
    module.chunk_kda = chunk_kda
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = inputs_of("train", small(TRAINING["kda"]["T8192-H64"], 40, 70), "cpu")
    known = {impl.name: impl for _, impl in peers.PEERS}
    for name in ("fla", "fla:disable_recompute"):
        assert known[name].takes("train", inputs.case)
        made = known[name].bound("train", inputs)()
        assert made["dt_bias"].shape == inputs.dt_bias.shape
    assert asked == [False, True]
    assert not known["fla:disable_recompute"].takes("prefill", inputs.case)
    assert not known["fla:disable_recompute"].takes("train", TRAINING["gla"]["T8192-H32"])


def test_both_passes_need_the_same_kernels_of_fla():
    case = TRAINING["kda"]["T8192-H64"]
    kinds = {name: first.kinds(name, "fla", case) for name in (*TRAINING_PASSES, "prefill")}
    assert kinds["train"] == kinds["backward"]
    assert not kinds["train"] & kinds["prefill"]
    assert len(kinds["train"] & first.kinds("train", "fla:disable_recompute", case)) == 1  # the norm
    assert [first.is_tuned(name) for name in ("fla", "fla:disable_recompute", "flash_kda", "cula")] == [
        True,
        True,
        False,
        False,
    ]


# Whether a backward pass imports what PyTorch needs for its own, after what comes before a first call.
IMPORTS = """
import sys, torch
from bench import first
with torch.no_grad():
    first.start_autograd("cpu")
before = set(sys.modules)
x = torch.ones(2, requires_grad=True)
torch.autograd.grad(x * x, x, torch.ones(2))
print(len(before), len(set(sys.modules) - before))
"""


def test_a_first_call_does_not_pay_for_pytorchs_imports():
    before, more = map(int, run_python("-c", IMPORTS, cwd=str(ROOT)).split())
    assert before > 100
    assert more == 0


def test_every_kind_of_first_call_is_a_case():
    for suite, op, case in first.COMPILED:
        assert suites.SUITES[suite].entry(op, case)


def row(impl: str = "cula", case: str = "T8-H1", **more) -> results.Row:
    known = {field.name: None for field in dataclasses.fields(results.Row)}
    return results.Row(**{**known, "op": "kda", "pass_name": "train", "case": case, "impl": impl, **more})


def refusal(impl: str, case: str = "T8-H1") -> dict:
    return {"op": "kda", "case": case, "impl": impl, "reason": "no kernel"}


HEAD = {"device": "GPU", "driver": "1", "torch": "2", "cuda": "13", "peers": {}, "source_hash": "0"}


def test_parts_of_a_suite_meet_in_one_file(tmp_path):
    def written(head: dict, *rows: results.Row, beside: bool = True) -> tuple[set, list[dict]]:
        path = results.write(tmp_path, "kda_train", {**HEAD, **head}, list(rows), beside=beside)
        found = json.loads(path.read_text())
        return {(each["impl"], each["case"], each["call_ms"]) for each in found["cases"]}, found

    written({"refused": [refusal("cula"), refusal("fla", "T9-H1")]}, row("fla", call_ms=5.0))
    cases, found = written({"lengths": {"kda/T8-H1": "3 5"}}, row("cula", call_ms=1.0))
    assert cases == {("fla", "T8-H1", 5.0), ("cula", "T8-H1", 1.0)}
    assert [each["case"] for each in found["refused"]] == ["T9-H1"]  # cula has a figure now
    cases, found = written({}, row("cula", call_ms=2.0, first_call_ms=3.0), row("fla", "T9-H1", call_ms=4.0))
    assert cases == {("fla", "T8-H1", 5.0), ("cula", "T8-H1", 2.0), ("fla", "T9-H1", 4.0)}
    assert "refused" not in found
    assert found["lengths"] == {"kda/T8-H1": "3 5"}
    _, found = written({}, row("cula", call_ms=2.5))
    assert [each["first_call_ms"] for each in found["cases"] if each["impl"] == "cula"] == [3.0]
    assert written({"source_hash": "1"}, row(call_ms=6.0))[0] == {("cula", "T8-H1", 6.0)}
    assert written({"source_hash": "1"}, row("fla", call_ms=7.0), beside=False)[0] == {("fla", "T8-H1", 7.0)}


def refuse(_pass_name: str, _inputs: Inputs):
    raise NotImplementedError("no backend computes them here\n(sm90: no kernel)")


def fail(_pass_name: str, _inputs: Inputs):
    raise RuntimeError("wrong compiler")


@pytest.fixture
def _as_a_gpu(monkeypatch):
    """This CPU, as if it were a GPU."""
    cpu_as_gpu.install(monkeypatch, peak_bytes=lambda bind: 2_500_000_000 if bind()() else 0)


def measured(suite: suites.Suite, impls: list[Impl], output: Path, *, case: str = "") -> main.Run:
    run = main.Run(Namespace(case=case, impl="", quick=True, output=output))
    entries = (dataclasses.replace(each, case=small(each.case)) for each in suite.entries)
    run.suite(dataclasses.replace(suite, entries=tuple(entries), impls=lambda: impls, device=cpu))
    return run


@pytest.mark.usefixtures("_as_a_gpu")
def test_a_small_suite_from_end_to_end(monkeypatch, tmp_path, cudnn, capsys):
    """Ours goes by FLA's name, too; one peer fails."""
    impls = [OURS, Impl("fla", OURS.bind, OURS.takes), cudnn, Impl("broken", fail, OURS.takes)]
    for name in TRAINING_PASSES:
        run = measured(suites.SUITES[f"kda_{name}"], impls, tmp_path, case="T8192-H64|N1")
        assert not run.failed
    assert "d_dt_bias" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/kda_train.json")
    found = json.loads(path.read_text())
    assert [each["impl"] for each in found["cases"]] == ["cula", "fla", "cudnn"] * 4
    assert {each["reason"] for each in found["refused"]} == {"wrong compiler"}
    for each in found["cases"]:
        assert set(each["rel_err_gradients"]) == {*training_tables.GRADIENTS} - {"erase"}  # of gdn2 alone
        assert (each["peak_gb"], each["pass"], each["rel_err_out"]) == (2.5, "train", None)

    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    plot.main()
    assert path.with_name("kda_train-impls.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    lines = training_tables.gpu_training()
    assert sum(line.startswith(("| kda backward | T", "| kda train | T")) for line in lines) == 8
    (head,) = (line for line in lines if line.startswith("| call"))
    assert head == "| call | case | cula: ms, GB | FLA: ms, GB | cuDNN: ms, GB |"
    words = " ".join(" ".join(lines).split())
    assert "- broken does not run kda T8192-H64, kda T2048-H12-N1," in words
    assert words.endswith("T8192-H16-N1: wrong compiler")
    lines = training_tables.gpu_gradients()
    assert sum(line.startswith("| kda | T8192-H64 |") for line in lines) == len(impls) - 1
    assert lines[-1] == "Our error is no larger than FLA's in 28 of 28 gradients that both compute."
    assert sum(line.startswith("| kda ") for line in training_tables.readme()) == 8
    assert training_tables.cpu_training() == result_tables.NONE_YET


def test_first_calls_stand_below_the_table():
    calls = {
        "cula": {"first_call_ms": 9.6},
        "cudnn": {"first_call_ms": None},
        "fla": {"first_call_ms": 234e3},
    }
    without = {"cula": {"first_call_ms": None}}
    lines = training_tables._first_calls({("kda train", "T1"): calls, ("kda train", "T2"): without})
    assert lines == ["- first call of kda train T1: cula 9.6 ms; FLA 234 s", ""]
    assert training_tables._first_calls({("kda train", "T2"): without}) == []


@pytest.mark.usefixtures("_as_a_gpu")
def test_no_kernel_is_a_result(monkeypatch, tmp_path):
    """A call of ours that has no kernel is no failure; what fails in another way is one."""
    suite = suites.SUITES["gdn_backward"]
    refusing = dataclasses.replace(OURS, bind=refuse)
    assert not measured(suite, [refusing], tmp_path).failed
    assert measured(suite, [dataclasses.replace(OURS, bind=fail)], tmp_path / "elsewhere").failed
    (path,) = tmp_path.glob("*/gdn_backward.json")
    found = json.loads(path.read_text())
    assert found["cases"] == []
    reason = "no backend computes them here (sm90: no kernel)"
    assert found["refused"] == [{"op": "gdn", "case": "T8192-16-64", "impl": "cula", "reason": reason}]
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    plot.main()
    assert not list(tmp_path.glob("*/*.png"))
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert training_tables.gpu_training()[-1] == f"- cula does not run gdn T8192-16-64: {reason}"
    assert training_tables.gpu_gradients() == training_tables.NO_TRAINING_YET
    assert training_tables.readme() == [""]


def test_no_results_of_training(monkeypatch, tmp_path):
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert training_tables.gpu_training() == training_tables.NO_TRAINING_YET
    assert training_tables.gpu_gradients() == training_tables.NO_TRAINING_YET
    assert training_tables.cpu_training() == result_tables.NONE_YET
    assert training_tables.readme() == [""]


@pytest.mark.usefixtures("_as_a_gpu")
def test_ours_on_a_cpu_is_beside_the_chunk_form(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "driver", lambda: None)
    for name in TRAINING_PASSES:
        measured(suites.SUITES[f"cpu_{name}"], cpu_impls(), tmp_path)
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    lines = training_tables.cpu_training()
    calls = [line.split(" | ")[0].removeprefix("| ") for line in lines if "T4096-H16" in line]
    assert calls == ["kda backward", "gdn backward", "kda train", "gdn train"]
    assert training_tables.gpu_training() == training_tables.NO_TRAINING_YET
