# SPDX-License-Identifier: Apache-2.0
"""The test runs on a GPU, and what they leave in bench/results/<gpu>/: python tests/gpu/run.py
test|sanitize|fuzz|fla. The fuzzer runs on a CPU, too."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import machine  # noqa: E402  (once ROOT is on the path)
from bench.results import RESULTS  # noqa: E402  (once ROOT is on the path)
from bench.suites import GPU_SOURCES  # noqa: E402  (once ROOT is on the path)

from cula.bench import cpu, gpu  # noqa: E402  (as bench finds it)

INTERRUPTED, NOTHING_LEFT = 2, 5  # what pytest exits with
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error.*, (\d+) warning"
)
FLA_FILES = (
    "kda,gdn,gdn2,gla,simple_gla,lightning_attn,linear_attn,retention,delta,delta_product,gdp,"
    "rwkv7,dplr_delta"
)

# What the fuzzer calls of each device: a target or family, "auto" for the library's choice; with the options
# of those that take few calls, and how much of the count is theirs.
FUZZED = {
    "cuda": {
        "sm90": ([], 0.3),
        "sm90:fused": (["--with", "one_kernel"], 0.15),
        "sm90:joined": (["--with", "one_kernel"], 0.15),
        "sm80": ([], 0.2),
        "auto": ([], 0.2),
    },
    "cpu": {"cpu": ([], 0.8), "auto": ([], 0.2)},
}

# name: (arguments of pytest, environment); of large tests one at a time
SUITES = {
    "laws and cases": (["--device", "cuda", "tests", "--ignore", "tests/gpu", "-m", "not large"], {}),
    "GPU only": (["--device", "cuda", "tests/gpu", "-m", "not large"], {}),
    "large": (["--device", "cuda", "tests", "-m", "large"], {}),
    "values on the device": (
        ["--device", "cuda", "tests/api/test_validation.py"],
        {"CULA_DEBUG_CHECKS": "1"},
    ),
}


def head(device: ModuleType = gpu) -> dict:
    return {
        "device": device.name(),
        "driver": device.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": machine.commit(),
        "source_hash": machine.source_hash(*GPU_SOURCES),
    }


def write(name: str, result: dict, output: Path, of_run: dict) -> None:
    """The parts of one run may be run one at a time: an earlier one stays while the sources are the same.
    of_run: head() at the start of the run, since sources may change while it lasts."""
    path, first = output / machine.file_safe(of_run["device"]) / f"{name}.json", of_run
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("source_hash") == first["source_hash"]:
        result = {
            key: {**before[key], **value} if isinstance(value, dict) else value
            for key, value in result.items()
        }
    path.write_text(json.dumps({**first, **result}, indent=1) + "\n")
    print(f"wrote {path}")


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def pytest(arguments: list[str], more: dict[str, str], folder: Path = ROOT) -> int:
    """Its exit status. A signal to end reaches it as an interrupt, behind which it still says what has failed
    so far; in a session of its own, since `timeout` signals a whole process group. Signals are caught before
    it starts: what a shell has a job in the background ignore, it would ignore, too."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    process: subprocess.Popen | None = None

    def interrupt(*_: object) -> None:
        if process is None:
            raise KeyboardInterrupt
        process.send_signal(signal.SIGINT)

    ends = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(end, interrupt) for end in ends]
    try:
        process = subprocess.Popen(command, cwd=folder, env=environment(**more), start_new_session=True)
        return process.wait()
    finally:
        for end, handler in zip(ends, before, strict=True):
            signal.signal(end, handler)


def counts(report: Path) -> dict:
    """What a JUnit report says."""
    failed, skips, total = [], Counter(), 0
    for case in ElementTree.parse(report).iter("testcase"):
        total += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            skips[skip.get("message", "").splitlines()[0]] += 1
    skipped = skips.total()
    passed = total - skipped - len(failed)
    return {
        "passed": passed,
        "failed": len(failed),
        "skipped": skipped,
        "failures": failed,
        "skips": dict(skips),
    }


def test(options: argparse.Namespace) -> bool:
    suites, fine, of_run = {}, True, head()
    for name, (arguments, more) in SUITES.items():
        if not re.search(options.suite, name):
            continue
        with TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            parallel = ["-n", "0" if name == "large" else str(options.jobs)]
            start = time.perf_counter()
            status = pytest([f"--junitxml={report}", *arguments, *parallel, *options.pytest], more)
            seconds = time.perf_counter() - start
            if status == INTERRUPTED:
                print(f"{name}: interrupted, not recorded")
                return False
            suites[name] = (
                {**counts(report), "seconds": round(seconds, 1)} if report.exists() else {"exit": status}
            )
        if not options.pytest:
            write(
                "gpu_tests", {"suites": {name: suites[name]}, "planned": list(SUITES)}, options.output, of_run
            )
        fine &= status == 0
    for name, found in suites.items():
        print(
            f"{name}: "
            f"{', '.join(f'{found[key]} {key}' for key in ('passed', 'failed', 'skipped') if key in found)}"
        )
    return fine


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not found:
        raise SystemExit("run.py: compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    return found


def read_summary(text: str) -> dict:
    """Errors and warnings that compute-sanitizer counted, and the calls that it watched."""
    calls = re.search(r"^calls: (\d+)$", text, re.MULTILINE)
    found = SUMMARY.findall(text)
    if not found or not calls:
        tail = [line for line in text.splitlines() if line.strip()][-5:]
        return {"calls": 0, "errors": None, "what": tail}
    errors = max(int(plain or race) for plain, race, _ in found)
    return {
        "calls": int(calls[1]),
        "errors": errors,
        "warnings": max(int(warned or 0) for *_, warned in found),
    }


def together(found: list[dict]) -> dict:
    """What the processes that shared a tool's calls found, as one: without a count of errors where one of
    them has none."""
    counted = all(share["errors"] is not None for share in found)
    return {
        "calls": sum(share["calls"] for share in found),
        "errors": sum(share["errors"] for share in found) if counted else None,
        "warnings": sum(share.get("warnings", 0) for share in found),
        "exit": max((share["exit"] for share in found), key=abs),
    }


def reports(text: str) -> str:
    """What compute-sanitizer said, without the host's frames, each time behind the call that it was about, or
    the one before: the tool and the calls print side by side."""
    kept: list[str] = []
    for line in text.splitlines():
        if "Host Frame" in line or line.strip(" =") == "":
            continue
        if line.startswith("call of ") and kept and kept[-1].startswith("call of "):
            kept.pop()
        kept.append(line)
    return "\n".join(kept)


def sanitize(options: argparse.Namespace) -> bool:
    program, fine, of_run = sanitizer(), True, head()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"Version ([\d.]+)", version)
    for tool in options.tools.split(","):
        watch = [program, "--tool", tool, "--kernel-name", "kns=cula"]
        watch += ["--error-exitcode", "1", "--print-limit", "20"]
        command = [*watch, sys.executable, str(ROOT / "tests" / "gpu" / "sanitize_cases.py")]

        def share(number: int, tool: str = tool, command: list[str] = command) -> tuple[dict, str]:
            # Without torch's own caching every tensor is an allocation that the tool knows the ends of.
            more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CULA_SANITIZER_TOOL": tool}
            more |= {"CULA_SANITIZER_SHARE": f"{number}/{options.jobs}", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment(**more), capture_output=True, text=True, check=False
            )
            text = done.stdout + done.stderr
            return {**read_summary(text), "exit": done.returncode}, text

        start = time.perf_counter()
        with ThreadPoolExecutor(options.jobs) as pool:
            shares = list(pool.map(share, range(options.jobs)))
        whole = {
            **together([found for found, _ in shares]),
            "seconds": round(time.perf_counter() - start, 1),
        }
        for found, text in shares:
            clean = found["exit"] == 0 and found["errors"] == 0 and not found.get("warnings")
            if not clean:
                print(reports(text))
            fine &= clean
        print(f"{tool}: {whole}", flush=True)
        result = {"sanitizer": version and version[1], "tools": {tool: whole}}
        write("sanitizer", result, options.output, of_run)
    return fine


def fuzz(options: argparse.Namespace) -> bool:
    """The fuzzer on every target, each with seeds of its own."""
    failures, of_run = 0, head({"cuda": gpu, "cpu": cpu}[options.device])
    for number, (name, (more, share)) in enumerate(FUZZED[options.device].items()):
        seed, count = options.seed + number, int(options.count * share)
        with TemporaryDirectory() as folder:
            record = Path(folder) / "record.json"
            command = [sys.executable, "-m", "fuzz", "--device", options.device, "--backend", name]
            command += ["--seed", str(seed), "--count", str(count), "--workers", str(options.jobs), *more]
            start = time.perf_counter()
            subprocess.run([*command, "--json", str(record)], cwd=ROOT, env=environment(), check=False)
            found = json.loads(record.read_text())
        kept = {
            key: found[key]
            for key in ("seed", "cases", "calls", "by_backend", "by_pass", "by_algorithm", "excused")
        }
        kept["worst_excused"] = round(found["worst_excused"], 2)
        lines = [f"{failure['reproduce']}: {failure['wrong'][0]}" for failure in found["failures"]]
        target = {**kept, "failures": lines, "seconds": round(time.perf_counter() - start, 1)}
        failures += len(lines)
        write("fuzz", {"targets": {name: target}}, options.output, of_run)
    return failures == 0


def fla(options: argparse.Namespace) -> bool:
    """FLA's own operator tests on our drop-ins, or on FLA's functions with this library behind them. An
    interrupted run is recorded as far as it came, and --rest goes on from there."""
    options.fla_tests = options.fla_tests.resolve()
    names = options.files.split(",")
    files = [options.fla_tests / "ops" / f"test_{name}.py" for name in names]
    if missing := [str(path) for path in files if not path.exists()]:
        raise SystemExit(f"run.py: --fla-tests must name FLA's folder tests; not there: {', '.join(missing)}")
    kept, of_run = {"drop-ins": "fla_tests", "registry": "fla_registry"}[options.through], head()
    with TemporaryDirectory() as folder:
        record, known = Path(folder) / "record.json", Path(folder) / "known.json"
        known.write_text(json.dumps(passed_before(kept, options.output, of_run) if options.rest else []))
        command = ["-p", "cula_testing.fla_plugin", f"--fla-record={record}", f"--fla-known={known}"]
        command += [f"--fla-through={options.through}", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir", str(options.fla_tests.parent)]
        # A few tests take a minute and more: what waits behind one of them is taken over by others.
        command += ["-n", str(options.jobs), "--dist", "worksteal", *map(str, files), *options.pytest]
        status = pytest(command, {}, options.fla_tests.parent)
        if not record.exists():
            raise SystemExit("run.py: FLA's tests did not start")
        result = json.loads(record.read_text())
    result |= {
        "fla": machine.peer_versions().get("FLA"),
        "files": dict.fromkeys(names, "in part" if status == INTERRUPTED else "whole"),
    }
    print(dict(Counter(case["outcome"] for case in result["cases"].values())))
    if not options.pytest:
        write(kept, result, options.output, of_run)
    return status == 0 or (options.rest and status == NOTHING_LEFT)


def passed_before(kept: str, output: Path, of_run: dict) -> list[str]:
    """Of these sources, as far as they are recorded."""
    path = output / machine.file_safe(of_run["device"]) / f"{kept}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("source_hash") != of_run["source_hash"]:
        return []
    return [name for name, case in before["cases"].items() if case["outcome"] != "failed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("test", help="the common tests on CUDA tensors, and those for GPUs alone")
    verb.add_argument("--jobs", type=int, default=min(8, (os.cpu_count() or 2) // 2))
    verb.add_argument("--suite", default="", help=f"regular expression on: {', '.join(SUITES)}")
    verb.set_defaults(run=test)
    verb = verbs.add_parser("sanitize", help="small calls under compute-sanitizer")
    verb.add_argument("--tools", default=",".join(TOOLS))
    verb.add_argument(
        "--jobs", type=int, default=min(4, (os.cpu_count() or 2) // 2), help="processes that share the calls"
    )
    verb.set_defaults(run=sanitize)
    verb = verbs.add_parser("fuzz", help="random calls beside a float64 recurrence (docs/fuzzing.md)")
    verb.add_argument("--device", choices=FUZZED, default="cuda")
    verb.add_argument("--seed", type=int, default=100)
    verb.add_argument("--count", type=int, default=100_000)
    verb.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    verb.set_defaults(run=fuzz)
    verb = verbs.add_parser("fla", help="FLA's operator tests on this library")
    verb.add_argument("--fla-tests", type=Path, required=True, help="the folder tests of FLA's repository")
    verb.add_argument(
        "--through",
        choices=("drop-ins", "registry"),
        default="drop-ins",
        help="our names in FLA's tests, or FLA's own dispatch",
    )
    verb.add_argument("--files", default=FLA_FILES)
    verb.add_argument("--jobs", type=int, default=4)
    verb.add_argument("--rest", action="store_true", help="what has not passed yet on these sources")
    verb.set_defaults(run=fla)
    options, rest = parser.parse_known_args()
    options.pytest = [argument for argument in rest if argument != "--"]
    if not torch.cuda.is_available() and getattr(options, "device", "cuda") == "cuda":
        raise SystemExit("run.py: needs a GPU, and torch finds none here")
    raise SystemExit(0 if options.run(options) else 1)


if __name__ == "__main__":
    main()
