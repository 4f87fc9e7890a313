# SPDX-License-Identifier: Apache-2.0
"""`python -m cula.bench`: its options, the sizes that it chooses, its table, and one small run of it."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace

import pytest
import torch

import cula
from cula.bench import __main__ as program
from cula.bench import cpu, fla, headline, report
from cula.bench.cases import prefill_case
from cula.bench.headline import Entry
from cula.bench.impls import OURS, Impl
from cula.bench.report import Result
from cula_testing.process import run_python

pytestmark = pytest.mark.cpu_only("about the host side of the benchmark")

HEAD = {
    "cula": "1.0",
    "source": None,
    "device": "a machine",
    "driver": None,
    "torch": "2",
    "cuda": None,
    "copy_tbps": 0.1,
    "gemm_tflops": 2.0,
    "peers": {"FLA": "0.6.0"},
}


def result(**changes) -> Result:
    named = {
        "pass_name": "prefill",
        "algorithm": "kda",
        "case": "T64-H2",
        "tokens": 64,
        "sequences": 1,
        "heads": 2,
        "value_heads": 2,
        "target": "cpu:avx2",
        "ms": 2.0,
        "call_ms": 2.0,
        "gb": 0.1,
        "gflop": 1.0,
    }
    return Result(**{**named, **changes})


@pytest.fixture
def a_quick_machine(monkeypatch):
    """Its ceilings known without a measurement, few samples."""
    for name, value in {"prepare": None, "copy_tbps": 0.02, "gemm_tflops": 0.5}.items():
        monkeypatch.setattr(cpu, name, lambda value=value: value)
    monkeypatch.setattr(cpu, "QUICK_SECONDS", 0.001)


@pytest.mark.usefixtures("a_quick_machine")
def test_a_small_run(monkeypatch, tmp_path, capsys):
    small = headline._entries(dict.fromkeys(headline.PREFILLED, (2, 2)), 96, rows=2, decode_heads=2)
    monkeypatch.setattr(headline, "cpu_tokens", lambda *_, **__: 96)
    monkeypatch.setattr(headline, "cpu_entries", lambda _tokens: small)
    path = tmp_path / "found.json"
    program.main(["--device", "cpu", "--quick", "--json", str(path)])

    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert f"cula {cula.build_info().version}, torch {torch.__version__}" in lines
    assert sum(line.startswith("train ") for line in lines) == 4
    assert "left out" not in printed.out
    assert [f"{n} of 11" in printed.err for n in range(1, 12)] == [True] * 11

    found = json.loads(path.read_text())
    assert (found["copy_tbps"], found["gemm_tflops"], found["peers"]) == (0.02, 0.5, {})
    kinds = [(row["pass"], row["algorithm"], row["case"]) for row in found["rows"]]
    assert kinds == [
        *(("prefill", name, "T96-H2") for name in ("kda", "gdn", "gla", "lightning")),
        *(("decode", name, "N2-H2") for name in ("kda", "gdn", "lightning")),
        *(("train", name, "T96-H2") for name in ("kda", "gdn", "gla", "lightning")),
    ]
    for row in found["rows"]:
        assert row["ms"] > 0
        assert row["gb"] > 0
        assert row["gflop"] > 0
        assert row["target"].startswith("cpu:")
        beside = {
            "prefill": ["eager_chunk", "eager_recurrent"],
            "decode": ["eager_recurrent"],
            "train": ["eager_chunk"],
        }
        assert list(row["peers"]) == beside[row["pass"]]
        assert min(row["peers"].values()) > 0


def test_it_runs_as_a_program_of_the_package_alone(tmp_path):
    """Neither the tests nor the repository's benchmark are needed."""
    code = (
        "import runpy, sys; sys.argv = ['cula.bench', '--help']\n"
        "try: runpy.run_module('cula.bench', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'bench', 'cula_testing', 'fla', 'numpy.testing'} & set(sys.modules)"
    )
    assert "--json FILE" in run_python("-c", code, cwd=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--seconds", "none"], "argument --seconds: must be a number of seconds from 1 on, got 'none'"),
        (["--seconds", "0"], "argument --seconds: must be a number of seconds from 1 on, got '0'"),
        (["--seconds", "nan"], "argument --seconds: must be a number of seconds from 1 on, got 'nan'"),
        (
            ["--json", "no/such/folder/x.json"],
            "argument --json: the folder of no/such/folder/x.json does not",
        ),
        (["--json", "/"], "argument --json: / cannot be written"),
        (["--device", "cuda"], "argument --device: cuda: torch 9 finds no GPU"),
        (["--quickly"], "unrecognized arguments: --quickly"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch, "__version__", "9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        program.options_of(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_without_kernels_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "_no_gpu", lambda: "no kernel runs on it")
    assert program.options_of([]).device == "cpu"
    with pytest.raises(SystemExit):
        program.options_of(["--device", "cuda"])
    assert "argument --device: cuda: no kernel runs on it" in capsys.readouterr().err


def test_defaults(monkeypatch):
    monkeypatch.setattr(program, "_no_gpu", lambda: "")
    assert vars(program.options_of([])) == {"device": "cuda", "quick": False, "seconds": 120.0, "json": None}
    assert program.options_of(["--quick"]).seconds == 25
    assert program.options_of(["--quick", "--seconds", "600"]).seconds == 600


@pytest.mark.parametrize(
    ("milliseconds", "quick", "tokens"),
    [(0.1, False, 4096), (30, False, 1024), (1000, False, 256), (0.1, True, 1024), (1000, True, 256)],
)
def test_a_slow_cpu_gets_shorter_sequences(milliseconds, quick, tokens):
    asked = []

    def time_of(impl, entry):
        asked.append((impl.name, entry.pass_name, entry.case.tokens))
        return milliseconds / 1e3

    assert headline.cpu_tokens(60, quick=quick, time_of=time_of) == tokens
    assert set(asked) == {
        ("cula", "prefill", 256),
        ("eager_chunk", "prefill", 256),
        ("eager_recurrent", "prefill", 256),
        ("cula", "train", 256),
        ("eager_chunk", "train", 256),
    }


def test_a_small_gpu_gets_fewer_heads():
    names = [{entry.name for entry in headline.gpu_entries(gib << 30)} for gib in (79, 7, 3, 1)]
    assert names[0] == {"T8192-H64", "T8192-16-64", "T8192-H32", "N32-H32"}
    assert names[1] == {"T8192-H32", "T8192-8-32", "T8192-H16", "N32-H32"}
    assert names[2] == {"T8192-H16", "T8192-4-16", "T8192-H8", "N32-H32"}
    assert names[3] == {"T8192-H8", "T8192-2-8", "T8192-H4", "N32-H32"}


def test_the_table():
    rows = [
        result(peers={"eager_chunk": 5.0}),
        result(pass_name="train", left_out={"fla": "no time was left"}),
        result(algorithm="gdn", ms=None, call_ms=None, target=None, left_out={"cula": "ValueError: no"}),
    ]
    lines = report.table(rows, HEAD).splitlines()
    assert lines[0] == "a machine; copy 100 GB/s, bf16 matrix product 2 TFLOP/s"
    assert lines[1] == "cula 1.0, torch 2, FLA 0.6.0"
    titles = "pass algorithm case target ms chunk form FLA GB/s %copy TFLOP/s %matmul"
    assert lines[3].split() == titles.split()
    # 0.1 GB and 1 GFLOP in 2 ms are 50 GB/s and half a TFLOP/s.
    assert " ".join(lines[4].split()) == "prefill kda T64-H2 cpu:avx2 2 2.5 x - 50 50% 0.5 25%"
    assert " ".join(lines[5].split()) == "train kda T64-H2 cpu:avx2 2 - - 50 50% 0.5 25%"
    assert lines[6].split() == ["prefill", "gdn", "T64-H2", "none", *["-"] * 7]
    assert len({line.rindex(line.split()[-1]) + len(line.split()[-1]) for line in lines[3:7]}) == 1
    assert lines[-2] == "FLA is left out of train kda: no time was left"
    assert lines[-1] == "cula is left out of prefill gdn: ValueError: no"


def entry() -> Entry:
    return Entry("prefill", "T32-H1", prefill_case("kda", (32,), 1))


@pytest.mark.usefixtures("a_quick_machine")
def test_a_peer_that_fails_or_comes_too_late_is_left_out_with_the_reason():
    def fails(_pass_name, _inputs):
        raise RuntimeError("has no\nkernel")

    options = Namespace(seconds=100.0, quick=True)
    peers = [Impl("fails", fails, OURS.takes), Impl("works", OURS.bind, OURS.takes)]
    progress = program.Progress()
    found = program.measured(entry(), peers, cpu, progress, options)
    assert found.left_out == {"fails": "RuntimeError: has no kernel"}
    assert list(found.peers) == ["works"]

    called = []
    counted = Impl("counted", lambda *_: lambda: called.append(1), OURS.takes)
    program.measured(entry(), [counted], cpu, progress, Namespace(seconds=0.0, quick=True))
    assert not called
    times = cpu.times({"counted": [lambda: called.append(1)]}, until=0.0)
    assert len(called) == 2  # the first call, and one sample
    assert times["counted"].call_ms >= 0

    progress.start -= 101
    late = program.measured(entry(), peers, cpu, progress, options)
    assert late.left_out == {"fails": "no time was left", "works": "no time was left"}
    assert late.ms > 0


@pytest.mark.usefixtures("a_quick_machine")
def test_a_failure_of_ours_fails_the_program(monkeypatch, capsys):
    def fails(_pass_name, _inputs):
        raise ValueError("no")

    monkeypatch.setattr(program, "OURS", Impl(OURS.name, fails, OURS.takes))
    monkeypatch.setattr(headline, "cpu_tokens", lambda *_, **__: 32)
    monkeypatch.setattr(headline, "cpu_entries", lambda _tokens: [entry()])
    with pytest.raises(SystemExit, match="cula failed in some rows"):
        program.main(["--device", "cpu"])
    assert "cula is left out of prefill kda: ValueError: no" in capsys.readouterr().out


@pytest.mark.usefixtures("a_quick_machine")
@pytest.mark.parametrize("installed", [True, False])
def test_a_run_on_a_gpu(monkeypatch, capsys, tmp_path, installed):
    """The clocks of a CPU stand in for a GPU's, and our calls for FLA's where it would take them."""
    asked = []

    def small(free_bytes: int) -> list[Entry]:
        asked.append(free_bytes)
        heads = {name: (1, 2) if name == "gdn" else (2, 2) for name in headline.PREFILLED}
        return headline._entries(heads, 64, rows=2, decode_heads=2)

    monkeypatch.setattr(program, "_no_gpu", lambda: "")
    monkeypatch.setattr(program, "gpu", cpu)
    monkeypatch.setattr(program, "cpu", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 << 30, 8 << 30))
    monkeypatch.setattr(headline, "gpu_entries", small)
    stand_in = Impl("fla", OURS.bind, fla.FLA.takes)
    monkeypatch.setattr(fla, "prepare", lambda: None)
    monkeypatch.setattr(fla, "importable", lambda *_: [stand_in] if installed else [])
    monkeypatch.setattr(program.importlib.metadata, "version", lambda name: f"version of {name}")
    path = tmp_path / "found.json"
    program.main(["--quick", "--json", str(path)])

    lines = capsys.readouterr().out.splitlines()
    assert asked == [5 << 30]
    assert ("FLA: how many times as long it takes." in lines) == installed
    found = json.loads(path.read_text())
    assert found["peers"] == ({"FLA": "version of flash-linear-attention"} if installed else {})
    beside = {(row["pass"], row["algorithm"]) for row in found["rows"] if row["peers"]}
    every = {(row["pass"], row["algorithm"]) for row in found["rows"]}
    assert beside == (every - {("decode", "lightning")} if installed else set())
    assert {row["case"] for row in found["rows"]} == {"T64-H2", "T64-1-2", "N2-H2"}


def test_progress_on_a_terminal_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = itertools.count(10.0)
    monkeypatch.setattr(program.time, "perf_counter", lambda: next(clock))
    progress = program.Progress()
    progress.say("first")
    progress.say("second")
    progress.end()
    assert capsys.readouterr().err == "\r\x1b[K   1 s  first\r\x1b[K   2 s  second\r\x1b[K"
