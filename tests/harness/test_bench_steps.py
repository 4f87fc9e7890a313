# SPDX-License-Identifier: Apache-2.0
"""The suites of decode and verification: names, states of every kind, floors, FlashInfer, and a small run
from end to end."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import result_tables
import step_tables
from cula.bench import cost, cpu, fla
from cula.bench.impls import (
    COPY_DRAFTS,
    COPY_STATE,
    OURS,
    READ_AT_ONCE,
    READ_STATE,
    Impl,
    inputs_of,
    rotating,
    states_of,
)
from cula_testing import cpu_as_gpu, flashinfer_stand_in
from cula_testing.cases import Case, prefill_case

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import __main__ as main  # noqa: E402  (once ROOT is on the path)
from bench import peers, suites  # noqa: E402  (likewise)
from bench.accuracy import Oracle  # noqa: E402  (likewise)

pytestmark = pytest.mark.cpu_only("about the benchmark's host side")

FLOORS = [COPY_STATE, COPY_DRAFTS, READ_STATE]
STEPS = {name: suites.SUITES[name] for name in ("decode", "verify")}


@pytest.fixture(autouse=True)
def _no_gradients():
    """As the benchmark runs."""
    with torch.no_grad():
        yield


@pytest.fixture
def flashinfer(monkeypatch) -> Impl:
    flashinfer_stand_in.install(monkeypatch)
    return peers.FLASHINFER


def small(case: Case) -> Case:
    rows = min(case.sequences, 3)
    return case.but(lengths=case.lengths[:rows], heads=2, value_heads=2 if case.algorithm == "kda" else 4)


def case_of(suite: str, op: str, name: str) -> Case:
    return small(STEPS[suite].entry(op, name).case)


@pytest.mark.parametrize("suite", STEPS)
def test_a_case_is_what_its_name_says(suite):
    for entry in STEPS[suite].entries:
        case, (rows, *words) = entry.case, entry.name.split("-")
        assert rows == f"N{case.sequences}"
        assert (f"S{case.lengths[0]}" in words) == (suite == "verify") == (case.lengths[0] > 1)
        assert "H32" in words
        assert case.heads == case.value_heads == 32
        assert ("bf16" in words) == (case.state_dtype == torch.bfloat16)
        assert ("read" in words) == case.reads_only
        assert ("warm" in words) == entry.warm
        assert case.pool
        assert case.key_dim == case.value_dim == 128
    names = [(entry.op, entry.name) for entry in STEPS[suite].entries]
    assert len(names) == len(set(names))


def test_what_the_suites_span():
    cases = {name: {(entry.op, entry.name) for entry in suite.entries} for name, suite in STEPS.items()}
    # These are the names of the records before there were more.
    assert {(op, f"N{n}-H32") for op in ("kda", "gdn") for n in (1, 8, 32, 128, 256)} <= cases["decode"]
    assert {("kda", "N32-S4-H32"), ("gdn", "N32-S4-H32")} <= cases["verify"]
    for op in ("kda", "gdn"):
        for n in (1, 8, 32, 128, 256):
            assert {(op, f"N{n}-H32{states}") for states in ("", "-bf16")} <= cases["decode"]
            verify = {
                (op, f"N{n}-S4-H32{states}{kept}") for states in ("", "-bf16") for kept in ("", "-read")
            }
            assert verify <= cases["verify"]
    warm = {name for names in cases.values() for _, name in names if name.endswith("-warm")}
    assert warm == {
        f"N{n}-{what}-warm"
        for n in (1, 8, 32)
        for what in ("H32", "H32-bf16", "S4-H32-read", "S4-H32-bf16-read")
    }


def test_who_is_compared(monkeypatch):
    everybody = [OURS, fla.FLA, peers.FLASHINFER, *FLOORS]
    monkeypatch.setattr(suites, "gpu_impls", lambda: everybody)

    def names(suite: str, op: str, case: str) -> list[str]:
        suite = dataclasses.replace(STEPS[suite], impls=lambda: everybody)
        return [impl.name for impl in suite.impls_of(suite.entry(op, case))]

    assert names("decode", "kda", "N8-H32") == ["cula", "fla", "copy_state"]
    assert names("decode", "gdn", "N8-H32-warm") == ["cula", "fla", "flashinfer", "copy_state"]
    assert names("decode", "gdn", "N8-H32-bf16") == ["cula", "flashinfer", "copy_state"]
    assert names("verify", "gdn", "N8-S4-H32-bf16") == ["cula", "flashinfer", "copy_state", "copy_drafts"]
    assert names("verify", "kda", "N8-S4-H32") == ["cula", "fla", "copy_state", "copy_drafts"]
    assert names("verify", "kda", "N8-S4-H32-read") == ["cula", "read_state"]


@pytest.mark.parametrize("states", ["", "-bf16"])
@pytest.mark.parametrize(
    ("suite", "name"), [("decode", "N8-H32"), ("verify", "N8-S4-H32"), ("verify", "N8-S4-H32{}-read")]
)
def test_results_are_the_oracles(flashinfer, suite, name, states):
    name = name.format(states) if "{}" in name else name + states
    case = case_of(suite, "gdn", name)
    for impl in (OURS, flashinfer):
        assert impl.takes(suite, case)
        inputs = inputs_of(suite, case, "cpu")
        oracle, before = Oracle(suite, inputs), inputs.initial_state.clone()
        given = impl.prepare(suite, inputs)
        o, found = impl.bind(suite, given)()
        errors = oracle.errors(o, states_of(suite, given, found))
        assert errors[0] < 5e-3
        limit = {torch.float32: 1e-5, torch.bfloat16: 5e-3}[case.state_dtype]
        assert errors[1] is None if case.reads_only else errors[1] < limit
        if case.reads_only:
            assert torch.equal(inputs.initial_state.nan_to_num(7), before.nan_to_num(7))


def test_the_oracle_has_some_heads_of_many_rows():
    inputs = inputs_of("verify", case_of("verify", "gdn", "N256-S4-H32").but(lengths=(4,) * 600), "cpu")
    oracle = Oracle("verify", inputs)
    assert oracle.o.shape[:3] == (600, 4, 2)  # 600 rows, one group of heads
    assert oracle.state.shape[:2] == (600, 2)
    o, states = OURS.bound("verify", inputs)()
    assert max(oracle.errors(o, states_of("verify", inputs, states))) < 5e-3


def test_flashinfer_is_given_what_its_prefill_leaves_to_others(flashinfer):
    for lengths in ((96,), (40, 0, 70)):
        case = prefill_case("gdn", lengths, 2, 4)
        inputs = inputs_of("prefill", case, "cpu")
        oracle = Oracle("prefill", inputs)
        assert max(oracle.errors(*flashinfer.bound("prefill", inputs)())) < 1e-2
        assert inputs.g.dtype == torch.bfloat16
    assert not flashinfer.takes("prefill", case.but(key_dim=64))
    assert not flashinfer.takes("prefill", prefill_case("kda", (96,), 2))
    assert not flashinfer.takes("train", case)


def test_floors_move_what_they_say():
    case = case_of("verify", "kda", "N8-S4-H32")
    inputs = inputs_of("verify", case, "cpu")
    one = cost.state_bytes(case)
    states = inputs.initial_state[inputs.initial_state_indices.long()]
    assert torch.equal(COPY_STATE.bound("verify", inputs)(), states)
    drafts = COPY_DRAFTS.bound("verify", inputs)()
    assert torch.equal(drafts, states[:, None].expand(-1, 4, -1, -1, -1))
    assert COPY_STATE.moves(case) == 2 * 3 * one
    assert COPY_DRAFTS.moves(case) == (3 + 3 * 4) * one == states.nbytes + drafts.nbytes
    reads = case_of("verify", "kda", "N8-S4-H32-bf16-read")
    inputs = inputs_of("verify", reads, "cpu")
    states = inputs.initial_state[inputs.initial_state_indices.long()]
    sums = READ_STATE.bound("verify", inputs)()
    exact = states.double().reshape(-1, READ_AT_ONCE).sum(-1)
    torch.testing.assert_close(sums.double(), exact, atol=0.1, rtol=0.01)
    assert READ_STATE.moves(reads) == states.nbytes
    assert states.nbytes < cost.moved_bytes("verify", inputs) < 1.2 * states.nbytes


def test_a_verification_that_keeps_nothing_moves_less():
    kept, read = (
        inputs_of("verify", case_of("verify", "gdn", name), "cpu") for name in ("N8-S4-H32", "N8-S4-H32-read")
    )
    less = cost.moved_bytes("verify", kept) - cost.moved_bytes("verify", read)
    assert less == 3 * 4 * cost.state_bytes(kept.case)


@pytest.fixture
def _as_a_gpu(monkeypatch):
    """This CPU, as if it were a GPU."""
    cpu_as_gpu.install(
        monkeypatch, times_like_calls=("gpu_ms", "host_ms"), last_level_cache_bytes=lambda: 4 << 20
    )


@pytest.mark.usefixtures("_as_a_gpu")
def test_a_small_run_from_end_to_end(monkeypatch, tmp_path, flashinfer, capsys):
    """Ours goes by FLA's name, too, where FLA would be measured."""
    also = Impl("fla", OURS.bind, fla.FLA.takes)
    sets: list[int] = []

    def counting(*given) -> list:
        made = rotating(*given)
        sets.append(len(made))
        return made

    monkeypatch.setattr(main, "rotating", counting)
    for suite in STEPS.values():
        entries = [entry for entry in suite.entries if entry.name.startswith("N8-")]
        tiny = dataclasses.replace(
            suite,
            entries=tuple(dataclasses.replace(each, case=small(each.case)) for each in entries),
            impls=lambda: [OURS, also, flashinfer, *FLOORS],
            device=cpu,
        )
        run = main.Run(Namespace(case="", impl="", quick=True, output=tmp_path))
        run.suite(tiny)
        assert not run.failed
        assert run.refused == []
    assert len(sets) == 2 * (2 + 4)  # what is warm has one set
    assert min(sets) > 1
    assert "read_state" in capsys.readouterr().out

    found = {name: json.loads(next(tmp_path.glob(f"*/{name}.json")).read_text())["cases"] for name in STEPS}
    for row in (*found["decode"], *found["verify"]):
        case = row["case"].split("-")
        assert row["state_dtype"] == ("bfloat16" if "bf16" in case else "float32")
        computes = row["impl"] in ("cula", "fla", "flashinfer")
        assert (row["rel_err_out"] is not None) is computes
        assert (row["rel_err_state"] is not None) is (computes and "read" not in case)

    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    lines = step_tables.gpu_steps()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| kda ", "| gdn "))]
    assert len(rows) == 2 * (2 + 4)
    for call, case, floor, *cells in rows:
        kept = "reading" if "read" in case else "copying to the drafts" if "verify" in call else "copying"
        assert floor == kept
        assert (cells[4] != "-") == ("decode" in call or "read" in case)
        assert all(cell.endswith("%") for cell in cells[1::4] if cell != "-")
        assert cells[2].endswith(" x") == call.startswith("gdn")
    assert "copying" in {floor for _, _, floor, *_ in rows}
    headlines = [line for line in result_tables.gpu_decode() if line.startswith(("| kda ", "| gdn "))]
    assert [line.split(" | ")[1] for line in headlines] == ["N8-H32"] * 2 + ["N8-S4-H32"] * 2
    assert all(line.split(" | ")[4].endswith("%") for line in headlines)
    errors = [line for line in result_tables.gpu_errors() if "N8-S4-H32-bf16-read" in line]
    assert len(errors) == 2
    assert "warm" not in "".join(errors)
    assert sum("N8-" in line for line in result_tables.gpu_calls()) == len(headlines)


def test_without_results(monkeypatch, tmp_path):
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert step_tables.gpu_steps() == step_tables.NOT_YET
