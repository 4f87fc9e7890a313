# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/run.py makes of the output of compute-sanitizer and of pytest: nothing passes that did not
run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("about reports")

SPEC = importlib.util.spec_from_file_location("gpu_run", Path(__file__).parents[1] / "gpu" / "run.py")
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)

CALLS = "calls: 440\n"


@pytest.mark.parametrize(
    ("text", "errors", "warnings"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, 0),
        ("========= ERROR SUMMARY: 1 error\n", 1, 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", 2, 1),
        (
            "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
            "= ERROR SUMMARY: 0 errors\n",
            0,
            1,
        ),
    ],
)
def test_a_summary(text, errors, warnings):
    assert run.read_summary(CALLS + text) == {"calls": 440, "errors": errors, "warnings": warnings}


@pytest.mark.parametrize(
    "text", ["", CALLS, "========= ERROR SUMMARY: 0 errors\n", "========= Device not supported\n"]
)
def test_half_a_run_is_no_run(text):
    assert run.read_summary(text)["errors"] is None


@pytest.mark.parametrize(
    ("second", "whole"),
    [
        ({"calls": 2, "errors": 0, "warnings": 1, "exit": 0}, {"errors": 0, "warnings": 1, "exit": 0}),
        ({"calls": 2, "errors": 3, "warnings": 0, "exit": 1}, {"errors": 3, "warnings": 0, "exit": 1}),
        ({"calls": 2, "errors": None, "exit": -9}, {"errors": None, "warnings": 0, "exit": -9}),
    ],
)
def test_shares_of_a_tool_are_one(second, whole):
    first = {"calls": 3, "errors": 0, "warnings": 0, "exit": 0}
    assert run.together([first, second]) == {"calls": 5, **whole}


def test_reports_stand_behind_the_call_that_they_are_about():
    text = (
        "call of prefill: Case(1)\ncall of prefill: Case(2)\n"
        "========= Uninitialized __global__ memory read of size 4 bytes\n"
        "=========     Host Frame: main\n========= \n"
        "call of decode: Case(3)\ncalls: 3\n"
    )
    assert run.reports(text).splitlines() == [
        "call of prefill: Case(2)",
        "========= Uninitialized __global__ memory read of size 4 bytes",
        "call of decode: Case(3)",
        "calls: 3",
    ]


@pytest.mark.parametrize("job", ["foreground", "background"])
def test_an_interrupted_suite_says_what_failed_and_is_not_recorded(tmp_path, job):
    """`timeout` ends a run by SIGTERM to its whole process group. A script's job in the background ignores
    SIGINT."""
    suite = tmp_path / "test_two.py"
    suite.write_text(
        "import time\n\n\ndef test_bad():\n    assert False\n\n\ndef test_slow():\n"
        "    print('waiting', flush=True)\n    time.sleep(60)\n"
    )
    ignores = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program = (ignores if job == "background" else "") + (
        "import argparse, importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('run', {str(Path(run.__file__))!r})\n"
        "run = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(run)\n"
        f"run.SUITES = {{'two': (['-s', '-p', 'no:cacheprovider', {str(suite)!r}], {{}})}}\n"
        "run.head = lambda: {}\nrun.write = lambda *_, **__: print('written')\n"
        "options = argparse.Namespace(suite='', jobs=0, pytest=[], output=None)\n"
        "sys.exit(0 if run.test(options) else 3)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    seen = ""
    while "waiting" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    os.killpg(process.pid, signal.SIGTERM)
    seen += process.communicate(timeout=30)[0]
    assert process.returncode == 3, seen
    assert all(text in seen for text in ("test_bad", "interrupted, not recorded")), seen
    assert "written" not in seen


def test_the_rest_of_flas_tests_is_what_has_not_passed_on_these_sources(tmp_path):
    now, later = ({"device": "a GPU", "source_hash": sources} for sources in ("now", "later"))
    outcomes = {"good": "passed", "bad": "failed", "left": "skipped"}
    cases = {name: {"outcome": outcome} for name, outcome in outcomes.items()}
    run.write("fla_tests", {"cases": cases}, tmp_path, now)
    assert run.passed_before("fla_tests", tmp_path, now) == ["good", "left"]
    assert run.passed_before("fla_tests", tmp_path, later) == []
    assert run.passed_before("fla_registry", tmp_path, now) == []


def test_parts_of_a_run_stay_together_while_the_sources_are_the_same(tmp_path):
    now, later = ({"device": "a GPU", "source_hash": sources} for sources in ("now", "later"))
    runs = [("one", now, ["one"]), ("two", now, ["one", "two"]), ("three", later, ["three"])]
    for name, of_run, kept in runs:
        run.write("gpu_tests", {"suites": {name: {"passed": 1}}}, tmp_path, of_run)
        (path,) = tmp_path.glob("*/gpu_tests.json")
        assert list(json.loads(path.read_text())["suites"]) == kept


def test_counts_of_a_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="no"/></testcase>'
        '<testcase classname="a" name="ill"><error message="no"/></testcase>'
        '<testcase classname="a" name="not"><skipped message="no GPU&#10;at all"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = run.counts(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["a::bad", "a::ill"]
    assert found["skips"] == {"no GPU": 1}
