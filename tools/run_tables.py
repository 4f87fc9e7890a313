# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from what tests/gpu/run.py left in bench/results. tools/update_docs.py puts them into
docs/."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from result_tables import prose

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def _read(name: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"*/{name}.json"))]


def _caption(result: dict) -> str:
    driver, cuda, sources = result["driver"], result["cuda"], result["source_hash"]
    return f"{result['device']}, driver {driver}; torch {result['torch']}, CUDA {cuda}; sources `{sources}`."


def table(head: list[str], rows: list[list[object]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, row)) + " |" for row in cells]


def _none(verb: str) -> list[str]:
    return [f"No run is recorded yet: `python tests/gpu/run.py {verb}`."]


def runs() -> list[str]:
    """Counts of the test suites, and why cases were skipped."""
    lines: list[str] = []
    for result in _read("gpu_tests"):
        suites = result["suites"]
        rows = [
            [name, *(found.get(key, "-") for key in ("passed", "failed", "skipped"))]
            for name, found in suites.items()
        ]
        left_out = [name for name in result.get("planned", ()) if name not in suites]
        rows += [[f"{name} (not run)", "-", "-", "-"] for name in left_out]
        lines += [*prose(_caption(result)), "", *table(["suite", "passed", "failed", "skipped"], rows), ""]
        reasons = Counter()
        for found in suites.values():
            reasons.update(found.get("skips", {}))
        for reason, count in reasons.most_common():
            lines += prose(f"- {count} skipped: {reason}", "  ")
        lines += [f"- failed: `{case}`" for found in suites.values() for case in found.get("failures", ())]
    return lines or _none("test")


def sanitizer() -> list[str]:
    """Errors that compute-sanitizer found, tool by tool."""
    lines: list[str] = []
    for result in _read("sanitizer"):
        rows = [
            [tool, found["calls"], found["errors"], found.get("warnings", "-")]
            for tool, found in result["tools"].items()
        ]
        caption = f"compute-sanitizer {result['sanitizer']}; {_caption(result)}"
        lines += [*prose(caption), "", *table(["tool", "calls watched", "errors", "warnings"], rows), ""]
    return lines[:-1] or _none("sanitize")


def fuzz() -> list[str]:
    """Calls of the fuzzer and what it found, target by target."""
    lines: list[str] = []
    for result in _read("fuzz"):
        rows = []
        for name, found in result["targets"].items():
            calls = ", ".join(
                f"{backend} {count:,}" for backend, count in sorted(found["by_backend"].items())
            )
            rows.append([f"`{name}`", found["seed"], f"{found['calls']:,}", calls, len(found["failures"])])
        driver = f", driver {result['driver']}" if result.get("driver") else ""
        caption = f"{result['device']}{driver}; torch {result['torch']}; sources `{result['source_hash']}`."
        lines += [
            *prose(caption),
            "",
            *table(["asked for", "seed", "calls", "by target", "failures"], rows),
            "",
        ]
        failures = [line for found in result["targets"].values() for line in found["failures"]]
        for call, wrong in (line.split(": ", 1) for line in failures):
            lines += prose(f"- `{call}`: {wrong}", "  ")
        lines += [""] if failures else []
    return lines or _none("fuzz")


def fla(through: str = "drop-ins") -> list[str]:
    """FLA's tests, function by function, every case that did not pass with its reason, and what was left to
    FLA's own code."""
    lines: list[str] = []
    record, command, called = {
        "drop-ins": ("fla_tests", "fla --fla-tests DIR", "drop-ins called"),
        "registry": ("fla_registry", "fla --through registry --fla-tests DIR", "functions run here"),
    }[through]
    for result in _read(record):
        declined: Counter = Counter()
        outcomes: dict[str, Counter] = defaultdict(Counter)
        calls: dict[str, Counter] = defaultdict(Counter)
        exceptions: dict[str, Counter] = defaultdict(Counter)
        for name, case in result["cases"].items():
            test = name.split("/")[-1].partition("[")[0].replace("::", " ")
            outcomes[test][case["outcome"]] += 1
            calls[test].update(case["calls"])
            declined.update(case.get("declined", {}))
            if case["outcome"] != "passed":
                exceptions[case["outcome"]][f"`{test}`: {case['reason']}"] += 1
        rows = [
            [
                f"`{test}`",
                *(found[key] for key in ("passed", "failed")),
                ", ".join(f"`{name}`" for name in calls[test]),
            ]
            for test, found in outcomes.items()
            if found["passed"] or found["failed"]
        ]
        total = sum(outcomes.values(), Counter())
        # Runs before there were backward kernels on GPUs counted comparisons of gradients as numbers.
        gradients = [case["gradients"] for case in result["cases"].values()]
        judged = sum(len(names) for names in gradients if isinstance(names, list))
        left_out = sum(count for count in gradients if isinstance(count, int))
        caption = _caption(result)
        if version := result.get("fla"):
            caption = f"FLA {version}; {caption}"
        unfinished = [name for name, how in result.get("files", {}).items() if how != "whole"]
        counts = (
            f"{total['passed']} cases passed, {total['failed']} failed, {total['skipped']} were skipped;"
            f" {judged} comparisons of gradients among them"
            f"{f', {left_out} more not evaluated' if left_out else ''}."
            f"{' Run in part: ' + ', '.join(unfinished) + '.' if unfinished else ''}"
        )
        lines += [
            *prose(caption),
            "",
            *prose(counts),
            "",
            *table(["test", "passed", "failed", called], rows),
        ]
        if declined:
            lines += ["", "Left to FLA's own code:", ""]
            for reason, count in sorted(declined.items()):
                lines += prose(f"- `{reason.replace(': ', '`: ', 1)} ({count} calls)", "  ")
        for outcome, found in sorted(exceptions.items()):
            lines += ["", f"{outcome.capitalize()}:", ""]
            for reason, count in found.items():
                lines += prose(f"- {reason} ({count} {'case' if count == 1 else 'cases'})", "  ")
    return lines or _none(command)
