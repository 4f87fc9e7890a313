# SPDX-License-Identifier: Apache-2.0
"""python -m cula.bench: how fast the kernels are on this machine, in at most two minutes."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import build_info, explain
from . import cost, cpu, gpu, headline, measure
from .headline import Entry
from .impls import OURS, Impl, inputs_of, rotating
from .measure import Call
from .report import Result, table

DESCRIPTION = """\
How fast the kernels are on this machine, in at most two minutes: prefill, decode, and a step of
training (forward + backward), with the shares of the machine's copy bandwidth and matrix rate that
they reach. On a CPU two careful versions in plain PyTorch are measured beside them, on a GPU
flash-linear-attention (FLA) where it is installed."""
EPILOG = """\
Sizes follow the machine: on a CPU sequences of 4,096, 1,024 or 256 tokens, on a GPU up to 64 heads.
FLA compiles and tunes its kernels when they first run, which can take a minute for each row; a row
that does not fit into the time is said to be left out, and a second run finds what was compiled.
OMP_NUM_THREADS sets the threads of a CPU, CUDA_VISIBLE_DEVICES chooses a GPU.
Quit other programs first: they make short calls look slow."""

SECONDS = 120.0
QUICK_SECONDS = 25.0
# No peer is started later: the first call of one that compiles may take a minute.
PEERS_SHARE = {"cpu": 0.85, "cuda": 0.5}
CPU_SHARE = 0.6  # what the rows are planned to take


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 1 on, got {text!r}")
    return seconds


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cula.bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where the kernels of this build run on a GPU"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, and shorter sequences on a CPU")
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="the time to plan for; default: 120, or 25 with --quick"
    )
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write what was measured, too")
    options = parser.parse_args(arguments)
    why_not = _no_gpu()
    options.device = options.device or ("cpu" if why_not else "cuda")
    if options.device == "cuda" and why_not:
        parser.error(f"argument --device: cuda: {why_not}")
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    return options


def _no_gpu() -> str:
    """Why nothing runs on a GPU here; "" where it does."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    if not build_info().cuda:
        return build_info().note()
    if explain(device="cuda").chosen is None:
        return f"no kernel runs on {torch.cuda.get_device_name()}: compute capability 8.0 is the least"
    return ""


class Progress:
    """A line on the error stream: of a terminal it is written over, elsewhere there is one for each row."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.over = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        line = f"{self.seconds:4.0f} s  {text}"
        sys.stderr.write(f"\r\x1b[K{line}" if self.over else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self.over:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _peers(device: ModuleType) -> list[Impl]:
    if device is cpu:
        return [impl for impl in headline.CPU_IMPLS if impl is not OURS]
    from . import fla

    fla.prepare()
    return fla.importable([(fla.MODULE, fla.FLA)], lambda why: print(why, file=sys.stderr))


def _head(device: ModuleType, peers: list[Impl]) -> dict[str, Any]:
    named = {"FLA": "flash-linear-attention"} if any(impl.name == "fla" for impl in peers) else {}
    return {
        "cula": build_info().version,
        "source": build_info().source,
        **measure.describe(device),
        "peers": {name: importlib.metadata.version(distribution) for name, distribution in named.items()},
    }


def measured(
    entry: Entry, peers: list[Impl], device: ModuleType, progress: Progress, options: argparse.Namespace
) -> Result:
    """The implementations take turns, over copies of the inputs that outgrow the caches."""
    case, pass_name = entry.case, entry.pass_name
    sets = rotating(pass_name, device, inputs_of(pass_name, case, device.DEVICE))
    calls: dict[str, list[Call]] = {}
    left_out: dict[str, str] = {}
    for impl in [OURS, *(peer for peer in peers if peer.takes(pass_name, case))]:
        if impl is not OURS and progress.seconds > PEERS_SHARE[device.DEVICE] * options.seconds:
            left_out[impl.name] = "no time was left"
            continue
        try:
            bound = [impl.bound(pass_name, inputs) for inputs in sets]
            bound[0]()
            device.wait()
        except Exception as error:  # whatever it is: the others are measured all the same
            left_out[impl.name] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            calls[impl.name] = bound
    times = device.times(calls, options.quick, progress.start + options.seconds)
    ours = times.pop(OURS.name, None)
    return Result(
        pass_name=pass_name,
        algorithm=entry.algorithm,
        case=entry.name,
        tokens=sum(case.lengths),
        sequences=case.sequences,
        heads=case.heads,
        value_heads=case.value_heads,
        target=entry.target(device.DEVICE),
        ms=None if ours is None else ours.milliseconds,
        call_ms=None if ours is None else ours.call_ms,
        gb=cost.moved_bytes(pass_name, sets[0]) / 1e9,
        gflop=cost.flops(pass_name, case) / 1e9,
        peers={name: taken.milliseconds for name, taken in times.items()},
        left_out=left_out,
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Result]]:
    """What was measured on, and the rows."""
    device = gpu if options.device == "cuda" else cpu
    progress = Progress()
    progress.say("copy bandwidth and matrix rate")
    device.prepare()
    peers = _peers(device)
    head = _head(device, peers)
    if device is gpu:
        torch.cuda.empty_cache()  # of the copy
        entries = headline.gpu_entries(torch.cuda.mem_get_info()[0])
    else:
        progress.say("how long the sequences may be")
        left = CPU_SHARE * options.seconds - progress.seconds
        entries = headline.cpu_entries(headline.cpu_tokens(left, quick=options.quick))
    rows = []
    for number, entry in enumerate(entries, 1):
        progress.say(f"{number} of {len(entries)}: {entry.pass_name} {entry.algorithm} {entry.name}")
        rows.append(measured(entry, peers, device, progress, options))
    progress.end()
    return head, rows


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    with torch.no_grad():
        head, rows = run(options)
    print(table(rows, head))
    if options.json is not None:
        words = {**head, "rows": [row.to_json() for row in rows]}
        options.json.write_text(json.dumps(words, indent=1) + "\n")
    if any(OURS.name in row.left_out for row in rows):
        raise SystemExit("cula failed in some rows, see above")


if __name__ == "__main__":
    main()
