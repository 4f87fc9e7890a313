# SPDX-License-Identifier: Apache-2.0
"""The benchmark itself: ragged lengths, the sections' cases, first calls, and one small section from end to
end."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import result_tables
from cula.bench import cpu, fla, report
from cula.bench.impls import OURS, Impl
from cula_testing.cases import (
    HEADLINES,
    MODELS,
    RAGGED,
    RAGGED_TOKENS,
    SECTIONS,
    Case,
    make,
    ragged_lengths,
)
from cula_testing.process import run_python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import __main__ as main  # noqa: E402  (once ROOT is on the path)
from bench import dist, first, machine, plot, suites  # noqa: E402  (once ROOT is on the path)

pytestmark = pytest.mark.cpu_only("about the benchmark's host side")


@given(st.sampled_from(RAGGED), st.integers(1, 300), st.integers(0, 5000), st.integers(0, 2**32))
def test_ragged_lengths(kind, count, more, seed):
    tokens = count + more
    lengths = ragged_lengths(kind, count, tokens, seed)
    assert (len(lengths), sum(lengths)) == (count, tokens)
    assert min(lengths) >= 1
    assert lengths == ragged_lengths(kind, count, tokens, seed)
    if kind == "uniform":
        assert max(lengths) - min(lengths) <= 1


def test_ragged_lengths_come_from_the_seed():
    assert ragged_lengths("random", 8, 32768) == (1327, 7158, 4139, 1158, 11055, 2834, 1501, 3596)
    assert ragged_lengths("skewed", 8, 32768) == (2411, 6028, 2010, 4019, 12054, 3015, 1508, 1723)
    for kind in ("random", "skewed"):
        assert len({ragged_lengths(kind, 32, 32768, seed) for seed in range(20)}) == 20


def test_skewed_lengths_are_those_of_ranks():
    longest, second, *_, shortest = sorted(ragged_lengths("skewed", 64, 1 << 20, seed=3), reverse=True)
    assert longest == pytest.approx(2 * second, rel=1e-3)
    assert longest == pytest.approx(64 * shortest, rel=1e-2)


def test_an_unknown_kind_of_ragged_lengths():
    with pytest.raises(ValueError, match="kind must be uniform, random or skewed, got 'even'"):
        ragged_lengths("even", 2, 8)


def entries(section: str) -> list[suites.Entry]:
    return list(suites.SUITES[section].entries)


def test_the_sections_are_the_group():
    assert suites.GROUPS["hopper"] == tuple(SECTIONS)
    assert set(SECTIONS).isdisjoint(suites.GROUPS["gpu"])
    for name in SECTIONS:
        names = [(entry.op, entry.name) for entry in entries(name)]
        assert len(names) == len(set(names))


def test_what_the_sections_span():
    ragged = [entry.case for entry in entries("prefill_ragged")]
    assert {case.sequences for case in ragged} == {8, 32, 128, 256}
    assert all(case.packed and case.tokens == RAGGED_TOKENS for case in ragged)
    few = [entry.case for entry in entries("prefill_low_parallelism") if entry.op == "kda"]
    assert {case.heads for case in few} == {4, 8, 16}
    assert max(case.tokens for case in few) == 1 << 20
    short = [case.tokens for entry in entries("prefill_short") if (case := entry.case).heads == 32]
    assert sorted(short) == [16, 32, 64, 128, 256, 512, 1024]
    fixed = suites.SUITES["prefill_fixed"]
    assert fixed.entry("kda", "B2-T8192-H64").case == HEADLINES["kda", "prefill"]["B2-T8192-H64"]
    low = suites.SUITES["prefill_low_parallelism"]
    assert low.entry("kda", "T131072-H8").case == HEADLINES["kda", "prefill"]["T131072-H8"]


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "train", "backward"])
def test_rwkv7_is_measured_with_heads_of_64_channels_too(pass_name):
    cases = {entry.name: entry.case for entry in suites.SUITES[f"rwkv7_{pass_name}"].entries}
    wide = {name: case for name, case in cases.items() if "H32" in name.split("-")}
    assert wide
    assert len(cases) == 2 * len(wide)
    for name, case in wide.items():
        other = cases[name.replace("H32", "H64-K64")]
        assert (case.heads, case.value_heads, case.key_dim, case.value_dim) == (32, 32, 128, 128)
        assert other == case.but(heads=64, value_heads=64, key_dim=64, value_dim=64)


def test_a_peer_gets_the_scale_of_the_case(monkeypatch):
    module, given = ModuleType("fla.ops.rwkv7"), []
    module.chunk_rwkv7 = lambda *_, scale, **__: given.append(scale) or (None, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    small = Case("rwkv7", (4,), key_dim=16, value_dim=16)
    for case in (small, small.but(scale=0.5)):
        fla.FLA.bound("prefill", make(case))()
    assert given == [0.25, 0.5]


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_has_its_share_of_the_heads(model):
    algorithm, heads, value_heads, gate = MODELS[model]
    ranks = {1: 0, 2: 0, 4: 0, 8: 0}
    for entry in entries("prefill_models"):
        name, _, more = entry.name.rpartition("-TP")
        if name == model:
            count, case = int(more.split("-")[0]), entry.case
            shape = (case.algorithm, case.heads * count, case.value_heads * count, case.gate)
            assert shape == (algorithm, heads, value_heads, gate)
            ranks[count] += 1
    assert set(ranks.values()) == {3}


def test_fla_runs_every_kind_that_is_listed_for_it():
    fla = Impl("fla", OURS.bind, OURS.takes)
    found = {
        (case.algorithm, case.gate, case.packed, case.heads, case.value_heads)
        for name in SECTIONS
        for entry in entries(name)
        if suites.SUITES[name].takes(fla, case := entry.case)
    }
    assert found == suites.FLA_KINDS


def test_kinds_of_kernels_that_fla_compiles():
    fixed = suites.SUITES["prefill_fixed"]
    long, short = (
        first.kinds("prefill", "fla", fixed.entry("kda", name).case) for name in ("T8192-H64", "T1024-H64")
    )
    assert len(long & short) == 1
    assert long - short == {"l2norm 8"}
    assert first.kinds("prefill", "fla", fixed.entry("lightning", "T8192-H64").case) == {
        "prefill lightning log_decay packed=False 64/64"
    }


def test_what_is_compiled_once_is_remembered_beside_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert first.kinds_in_cache() == set()

    def start(call, **_):
        program = (
            "raise SystemExit(1)" if call[3] == "fails" else "print('words before'); print('70123.456 ms')"
        )
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(first, "_start", start)
    new, norm, fails = (("suite", "kda", "case", name) for name in ("new", "norm", "fails"))
    times = first.of_tuned({new: {"form a", "l2norm 1"}, norm: {"l2norm 2"}, fails: {"form b"}})
    assert times == {new: 70123.456, fails: None}
    assert first.kinds_in_cache() == {"form a", "l2norm 1", "l2norm 2"}


def test_a_first_call_is_told_in_milliseconds():
    number, unit = run_python(
        "-m", "bench.first", "cpu_decode", "lightning", "N1-H32", "cula", cwd=str(ROOT)
    ).split()
    assert unit == "ms"
    assert 0.01 < float(number) < 60_000


def test_a_first_call_of_ours_looks_at_nobody_else():
    def others():
        raise AssertionError("imports them")

    assert first._impl(dataclasses.replace(suites.SUITES["decode"], impls=others), "cula") is OURS


def test_first_calls_in_words():
    assert [result_tables.duration(ms) for ms in (0.649, 2.051, 999.9, 70_123.0)] == [
        "0.6 ms",
        "2.1 ms",
        "999.9 ms",
        "70 s",
    ]


def result(rows: list[dict]) -> dict:
    common = {"op": "kda", "panel": "8 heads", "call_ms": 9.0, "gb": 8.0}
    return {"copy_tbps": 4.0, "cases": [{**common, **row} for row in rows]}


def test_a_panel_has_the_floor_and_is_sorted():
    rows = [
        {"impl": "cula", "tokens": 64, "sequences": 1, "gpu_ms": 3.0},
        {"impl": "fla", "tokens": 64, "sequences": 1, "gpu_ms": None},
        {"impl": "cula", "tokens": 16, "sequences": 1, "gpu_ms": 2.5, "gb": 4.0},
    ]
    assert plot.panels_of(result(rows)) == {
        ("kda", "8 heads"): {
            "cula": [(16, 2.5), (64, 3.0)],
            "floor": [(16, 1.0), (64, 2.0)],
            "fla": [(64, 9.0)],
        }
    }


def test_a_panel_of_equal_work_is_by_mean_length():
    rows = [{"impl": "fla", "tokens": 64, "sequences": n, "gpu_ms": float(n)} for n in (2, 16)]
    assert plot.panels_of(result(rows)) == {("kda", "8 heads"): {"fla": [(4, 16.0), (32, 2.0)]}}


def test_a_small_section_from_end_to_end(monkeypatch, tmp_path):
    """The ragged section with a few heads and tokens, on a CPU; ours goes by FLA's name too."""
    section = suites.SUITES["prefill_ragged"]

    def small(entry: suites.Entry) -> suites.Entry:
        lengths = ragged_lengths(entry.name.split("-")[0], 3 if "N8" in entry.name else 5, 60)
        return dataclasses.replace(entry, case=entry.case.but(lengths=lengths, heads=2, value_heads=2))

    impls = [OURS, Impl("fla", OURS.bind, OURS.takes)]
    chosen = [small(entry) for entry in section.entries if "N8" in entry.name or "N32" in entry.name]
    kinds = {("kda", "bounded", True, 2, 2)}
    monkeypatch.setattr(suites, "FLA_KINDS", kinds)
    for name, value in {"prepare": None, "copy_tbps": 0.02, "gemm_tflops": 0.5}.items():
        monkeypatch.setattr(cpu, name, lambda value=value: value)
    monkeypatch.setattr(cpu, "QUICK_SECONDS", 0.001)

    tiny = dataclasses.replace(section, entries=tuple(chosen), impls=lambda: impls, device=cpu)
    run = main.Run(Namespace(case="", impl="", quick=False, output=tmp_path))
    with torch.no_grad():
        run.suite(tiny)
    assert not run.failed
    (path,) = tmp_path.glob("*/prefill_ragged.json")
    found = json.loads(path.read_text())
    assert [row["impl"] for row in found["cases"]] == ["cula", "fla"] * len(chosen)
    assert {key: [int(n) for n in text.split()] for key, text in found["lengths"].items()} == {
        f"kda/{entry.name}": list(entry.case.lengths) for entry in chosen
    }
    assert {(row["tokens"], row["heads"], row["dtype"]) for row in found["cases"]} == {(60, 2, "bfloat16")}
    assert all(0 < row["rel_err_out"] < 1e-2 for row in found["cases"])

    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    plot.main()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    for row in found["cases"]:
        row["gpu_ms"] = row["call_ms"]  # the tables are about GPUs
    path.write_text(json.dumps(found))
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    lines = result_tables.section("prefill_ragged")
    assert sum(line.startswith("| kda, ") for line in lines) == len(chosen)
    assert any(line.startswith("![") and line.endswith("/prefill_ragged.png)") for line in lines)
    assert lines[-1].startswith(
        f"Our error is no larger than FLA's in {len(chosen)} of the {len(chosen)} cases"
    )


def test_results_name_the_peers_that_are_installed(monkeypatch):
    def version(distribution: str) -> str:
        if distribution != "flash-linear-attention":
            raise importlib.metadata.PackageNotFoundError(distribution)
        return "1.2"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine.peer_versions() == {"FLA": "1.2"}
    for name, value in {"copy_tbps": 4.0, "gemm_tflops": 700.0, "clock_mhz": []}.items():
        monkeypatch.setattr(cpu, name, lambda value=value: value)
    head = {**machine.describe(cpu), "source_hash": "0"}
    assert "; FLA 1.2; sources" in result_tables.gpu_caption(head)[0]
    assert "FlashKDA" not in result_tables.gpu_caption(head)[0]


def test_a_slow_machine_has_rates_above_zero(monkeypatch):
    """A busy CPU without bf16 instructions has less than a GFLOP/s of matrix products."""
    for name, value in {"copy_tbps": 4e-5, "gemm_tflops": 4e-4}.items():
        monkeypatch.setattr(cpu, name, lambda value=value: value)
    head = {**machine.describe(cpu), "cula": "0", "torch": "0", "peers": {}}
    case = report.Result(
        "prefill", "kda", "T64", 64, 1, 1, 1, "reference", ms=10.0, call_ms=10.0, gb=2e-4, gflop=2e-3
    )
    (row,) = (line for line in report.table([case], head).splitlines() if line.startswith("prefill"))
    assert row.split()[-4:] == ["0.02", "50%", "0.0002", "50%"]


@pytest.mark.parametrize(
    ("seconds", "size"),
    [((1e-3, 1e-3, 1e-3), 64), ((1e-3, 10.0), 32), ((5.0,), 16)],
    ids=["all", "two", "one"],
)
def test_products_grow_while_they_take_a_second_at_most(monkeypatch, seconds, size):
    left = list(seconds)
    monkeypatch.setattr(cpu, "GEMM_SIZES", (16, 32, 64))
    monkeypatch.setattr(cpu, "_seconds", lambda _call: left.pop(0))
    assert cpu.gemm_tflops() == 2 * size**3 / seconds[-1] / 1e12
    assert not left


def test_sections_without_results(monkeypatch, tmp_path):
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    for table in (*result_tables.SECTIONS.values(), result_tables.prefill_plot):
        assert table() == result_tables.NO_SECTION_YET


def test_cases_for_ranks_are_headlines_too_large_for_one_gpu():
    for op, name in dist.CASES["cuda"]:
        case = HEADLINES[op, "prefill"][name]
        assert case.tokens * case.value_heads > suites.ONE_GPU
        assert (case.sequences, case.key_dim, case.value_dim) == (1, 128, 128)


def test_two_ranks_from_end_to_end(monkeypatch, tmp_path, capsys):
    """A small case on the CPU: measured, written, drawn, told in a table."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {"prepare": None, "copy_tbps": 0.02, "gemm_tflops": 0.5}.items():
        monkeypatch.setattr(cpu, name, lambda value=value: value)
    small = {
        "T4096-H16": HEADLINES["kda", "prefill"]["T8192-H32"].but(lengths=(256,), heads=2, value_heads=2)
    }
    monkeypatch.setitem(dist.CPU_HEADLINES, ("kda", "prefill"), small)
    rows = dist.run(Namespace(case="", impl="", quick=True, output=tmp_path))
    assert {(row.impl, row.gpus) for row in rows} == {("cula", 1), *((impl, 2) for impl in dist.METHODS)}
    assert all(row.difference < dist.SAME and row.call_ms > 0 for row in rows)
    assert [row.impl for row in rows if row.exchange_ms is not None] == ["cula:scan"]
    assert "cula:ring" in capsys.readouterr().out

    (path,) = tmp_path.glob("*/dist_x2.json")
    found = json.loads(path.read_text())
    assert [row["case"] for row in found["cases"]] == ["T4096-H16-x1", *["T4096-H16-x2"] * len(dist.METHODS)]
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    plot.main()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    lines = result_tables.several_ranks()
    assert sum(line.startswith("| kda | T4096-H16 | 2 |") for line in lines) == len(dist.METHODS)
    assert any(line.startswith("![dist x2, speed-up against ranks]") for line in lines)


def test_speed_ups_are_beside_the_same_library_on_one_rank():
    rows = [
        ("cula", 1, 8.0),
        ("cula:ring", 2, 10.0),
        ("cula:ring", 4, 4.0),
        ("fla", 1, 30.0),
        ("fla", 4, 15.0),
    ]
    # Of a call on GPUs that was launched too late nothing but the time of a call is known.
    late = {"op": "kda", "case": "T8-H1-x2", "impl": "fla", "gpus": 2, "gpu_ms": None, "call_ms": 1.0}
    cases = [{"op": "kda", "case": f"T8-H1-x{n}", "impl": i, "gpus": n, "gpu_ms": ms} for i, n, ms in rows]
    expected = {"cula:ring": [(1, 1.0), (2, 0.8), (4, 2.0)], "fla": [(1, 1.0), (4, 2.0)]}
    assert plot.speedups_of({"driver": "1", "cases": [*cases, late]}) == {"KDA T8-H1": expected}
    expected["fla"].insert(1, (2, 30.0))
    assert plot.speedups_of({"driver": None, "cases": [*cases, late]}) == {"KDA T8-H1": expected}


def test_no_results_of_several_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert result_tables.several_ranks() == result_tables.NO_RANKS_YET
