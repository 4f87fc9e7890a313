# SPDX-License-Identifier: Apache-2.0
"""The test runs on a GPU, and what they leave in bench/results/<gpu>/: python tests/gpu/run.py
test|sanitize|fuzz|fla. The fuzzer runs on a CPU, too."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
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
        "sm90:fused": (["--with", "one_kernel"], 0.1),
        "sm90:fused_segments": (["--with", "one_kernel"], 0.1),
        "sm80": ([], 0.3),
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


def write(name: str, result: dict, output: Path, device: ModuleType = gpu) -> None:
    """The parts of one run may be run one at a time: an earlier one stays while the sources are the same."""
    path, first = output / machine.file_safe(device.name()) / f"{name}.json", head(device)
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


def pytest(arguments: list[str], more: dict[str, str], report: Path) -> tuple[int, float]:
    """Its exit status and its seconds."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(**more), check=False)
    return done.returncode, time.perf_counter() - start


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
    suites, fine = {}, True
    for name, (arguments, more) in SUITES.items():
        if not re.search(options.suite, name):
            continue
        with TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            parallel = ["-n", "0" if name == "large" else str(options.jobs)]
            status, seconds = pytest([*arguments, *parallel, *options.pytest], more, report)
            suites[name] = (
                {**counts(report), "seconds": round(seconds, 1)} if report.exists() else {"exit": status}
            )
        fine &= status == 0
    for name, found in suites.items():
        print(
            f"{name}: "
            f"{', '.join(f'{found[key]} {key}' for key in ('passed', 'failed', 'skipped') if key in found)}"
        )
    if not options.pytest:
        write("gpu_tests", {"suites": suites}, options.output)
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
    program, tools, fine = sanitizer(), {}, True
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
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
        tools[tool] = {
            **together([found for found, _ in shares]),
            "seconds": round(time.perf_counter() - start, 1),
        }
        for found, text in shares:
            clean = found["exit"] == 0 and found["errors"] == 0 and not found.get("warnings")
            if not clean:
                print(reports(text))
            fine &= clean
        print(f"{tool}: {tools[tool]}", flush=True)
    version = re.search(r"Version ([\d.]+)", version)
    write("sanitizer", {"sanitizer": version and version[1], "tools": tools}, options.output)
    return fine


def fuzz(options: argparse.Namespace) -> bool:
    """The fuzzer on every target, each with seeds of its own."""
    device = {"cuda": gpu, "cpu": cpu}[options.device]
    failures = 0
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
        write("fuzz", {"targets": {name: target}}, options.output, device)
    return failures == 0


def fla(options: argparse.Namespace) -> bool:
    """FLA's own operator tests on our drop-ins, or on FLA's functions with this library behind them."""
    options.fla_tests = options.fla_tests.resolve()
    files = [options.fla_tests / "ops" / f"test_{name}.py" for name in options.files.split(",")]
    if missing := [str(path) for path in files if not path.exists()]:
        raise SystemExit(f"run.py: --fla-tests must name FLA's folder tests; not there: {', '.join(missing)}")
    with TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "cula_testing.fla_plugin",
            f"--fla-record={record}",
            f"--fla-through={options.through}",
        ]
        command += ["-c", os.devnull, "--rootdir", str(options.fla_tests.parent), "-p", "no:cacheprovider"]
        command += ["-n", str(options.jobs), *map(str, files), *options.pytest]
        done = subprocess.run(command, cwd=options.fla_tests.parent, env=environment(), check=False)
        if not record.exists():
            raise SystemExit("run.py: FLA's tests did not run to the end")
        result = json.loads(record.read_text())
    result["fla"] = machine.peer_versions().get("FLA")
    print(dict(Counter(case["outcome"] for case in result["cases"].values())))
    if not options.pytest:
        write({"drop-ins": "fla_tests", "registry": "fla_registry"}[options.through], result, options.output)
    return done.returncode == 0


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
    verb.set_defaults(run=fla)
    options, rest = parser.parse_known_args()
    options.pytest = [argument for argument in rest if argument != "--"]
    if not torch.cuda.is_available() and getattr(options, "device", "cuda") == "cuda":
        raise SystemExit("run.py: needs a GPU, and torch finds none here")
    raise SystemExit(0 if options.run(options) else 1)


if __name__ == "__main__":
    main()
