# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: python -m bench --suite dist, over the GPUs of this machine (NCCL), or its CPU (gloo).

A process per rank, started here. Every rank draws the whole case from its seed, runs it alone, which is the
figure for one rank and what its part of every other result is compared with, and then takes its tokens. A
result is the median over calls of the slowest rank's time. The result file is dist_x<ranks>.json, of as many
as there were at most. docs/distributed.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

import cula
from bench import machine, results
from bench.results import RESULTS
from bench.suites import GPU_SOURCES
from cula.bench import cpu, gpu
from cula.bench.impls import PREFILL, keywords
from cula.bench.measure import Call
from cula.dist import even_splits, methods
from cula.dist.groups import Group
from cula.dist.messages import Message
from cula.dist.transport import ProcessGroupTransport
from cula_testing.cases import CPU_HEADLINES, HEADLINES, Case, Inputs, make

NAME = "dist"
SOURCES = (*GPU_SOURCES, "python/cula/dist")
CASES = {
    "cuda": [("kda", "T131072-H32"), ("kda", "T524288-H8"), ("gdn", "T131072-16-32")],
    "cpu": [("kda", "T4096-H16")],
}
RANKS = {"cuda": (1, 2, 4), "cpu": (1, 2)}
TIMEOUT = timedelta(seconds=300)  # FLA compiles for more than a minute, twice

WARM_UP_CALLS, SAMPLES, QUICK_SAMPLES = 2, 15, 5
MIN_WAIT, MAX_WAIT = 1e-3, 50e-3  # seconds that a GPU waits, so that calls are launched before they begin
SAME = 2e-2  # relative: two ways of computing one thing in bfloat16, from each other

# implementation: the method
METHODS = {"cula": None, "cula:scan": "scan", "cula:ring": "ring"}
FLA_OPS = ("kda",)  # it compiles for a minute for each; the others would take longer than all else


@dataclass(frozen=True)
class Row:
    suite: str
    op: str
    pass_name: str
    case: str
    impl: str
    gpus: int  # ranks
    dtype: str
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gpu_ms: float | None  # of the slowest rank, between events
    call_ms: float  # of the slowest rank, until the result is there
    exchange_ms: float | None  # of the maps alone, and their composition
    difference: float  # from one rank's o, relative, the worst rank's

    def to_json(self) -> dict:
        return {("pass" if name == "pass_name" else name): value for name, value in asdict(self).items()}


class Ranks:
    """The first ranks of all, as one of them sees them."""

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def slowest(self, own: list[float]) -> list[float]:
        return self._reduce(own, dist.ReduceOp.MAX)

    def all_of(self, fine: bool) -> bool:
        return bool(self._reduce([float(fine)], dist.ReduceOp.MIN)[0])

    def _reduce(self, own: list[float], operation: dist.ReduceOp) -> list[float]:
        values = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, operation, group=self.group)
        return values.tolist()

    def together(self) -> None:
        """Until all ranks are here: on a GPU its stream waits."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def times(self, call: Call, samples: int) -> tuple[float | None, float]:
        """Milliseconds of the slowest rank, medians: device time, and what the caller sees."""
        for _ in range(WARM_UP_CALLS):
            call()
        device = None
        if self.device == "cuda":
            wait = self._wait_seconds(call)
            while device is None and wait <= MAX_WAIT:
                own = [self._device_ms(call, wait) for _ in range(samples)]
                if self.all_of(None not in own):
                    device = median(self.slowest(own))
                wait *= 4
        seen = []
        for _ in range(samples):
            self.together()
            _wait(self.device)
            start = time.perf_counter()
            call()
            _wait(self.device)
            seen.append(1e3 * (time.perf_counter() - start))
        return device, median(self.slowest(seen))

    def _wait_seconds(self, call: Call) -> float:
        """How long a GPU must wait for the call to be launched: as long on every rank, or some would begin
        earlier."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        return min(MAX_WAIT, max(MIN_WAIT, 3 * self.slowest([host])[0]))

    def _device_ms(self, call: Call, wait: float) -> float | None:
        """None of a call that was launched too late, or itself waits for the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.together()
        torch.cuda._sleep(int(wait * gpu.MAX_CLOCK_HZ))
        begin.record()
        call()
        in_time = not begin.query()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) if in_time else None


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Rank:
    """One process's part of the benchmark."""

    def __init__(
        self, device: str, sizes: list[int], options: argparse.Namespace, report: Connection
    ) -> None:
        self.device, self.options, self.report = device, options, report
        self.rank = dist.get_rank()
        groups = {size: dist.new_group(list(range(size))) for size in sizes}
        self.ranks = {size: Ranks(group, device) for size, group in groups.items() if self.rank < size}
        self.samples = QUICK_SAMPLES if options.quick else SAMPLES

    def run(self, cases: list[tuple[str, str, Case]]) -> None:
        """FLA comes last: it compiles first, and may fail."""
        drawn: dict[tuple[str, str], tuple[Inputs, Tensor]] = {}
        for impl, (op, name, case) in itertools.chain(
            ((impl, each) for each in cases for impl in METHODS), (("fla", each) for each in cases)
        ):
            if not re.search(self.options.impl, impl) or (impl == "fla" and not self._fla_takes(op)):
                continue
            if (op, name) not in drawn:
                inputs = make(case, self.device, draw_on=self.device)
                drawn[op, name] = inputs, _whole(inputs)()[0]
            inputs, expected = drawn[op, name]
            for size, ranks in self.ranks.items():
                if size == 1 and impl not in ("cula", "fla"):
                    continue
                row = self.measure(impl, ranks, op, name, inputs, expected)
                if self.rank == 0 or isinstance(row, str):
                    self.report.send(row)
            dist.barrier()

    def _fla_takes(self, op: str) -> bool:
        return self.device == "cuda" and op in FLA_OPS and importlib.util.find_spec("fla") is not None

    def measure(
        self, impl: str, ranks: Ranks, op: str, name: str, inputs: Inputs, expected: Tensor
    ) -> Row | str:
        """A row, or where the first call fails a sentence; without one, where another rank's does."""
        splits = even_splits(inputs.case.tokens, ranks.size)
        own = slice(splits[ranks.rank], splits[ranks.rank + 1])
        failure = None
        try:
            call = (_fla if impl == "fla" else _cula)(inputs, ranks, splits, own, METHODS.get(impl))
            o = call()[0]
            _wait(self.device)
        except Exception as error:  # whatever it is: the others are told, and the next one is measured
            failure = f"{op}/{name}-x{ranks.size}: {impl} failed: {error}"
        if not ranks.all_of(failure is None):
            return failure or f"{op}/{name}-x{ranks.size}: {impl} failed on another rank"
        difference = float((o.float() - expected[:, own].float()).norm() / expected[:, own].float().norm())
        device_ms, call_ms = ranks.times(call, self.samples)
        maps = ranks.size > 1 and impl == "cula:scan"
        exchange = ranks.times(_exchange(inputs, ranks), self.samples) if maps else (None, None)
        case = inputs.case
        return Row(
            suite=NAME, op=op, pass_name="prefill", case=f"{name}-x{ranks.size}", impl=impl, gpus=ranks.size,
            dtype=str(case.dtype).removeprefix("torch."), tokens=case.tokens, heads=case.heads,
            value_heads=case.value_heads, key_dim=case.key_dim, value_dim=case.value_dim, gpu_ms=device_ms,
            call_ms=call_ms, exchange_ms=exchange[1] if self.device == "cpu" else exchange[0],
            difference=ranks.slowest([difference])[0],
        )  # fmt: skip


def _named(inputs: Inputs, own: slice) -> dict[str, Tensor]:
    """The tensors of some tokens, as a rank that never had the others would have them."""
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")}
    return {name: x[:, own].contiguous() for name, x in named.items() if x is not None}


def _whole(inputs: Inputs) -> Call:
    named = {**_named(inputs, slice(None)), **keywords(inputs), "scale": inputs.case.scale}
    return lambda: PREFILL[inputs.case.algorithm](**named, output_final_state=True)


def _cula(inputs: Inputs, ranks: Ranks, splits: list[int], own: slice, method: str | None) -> Call:
    named = {
        **_named(inputs, own),
        **keywords(inputs),
        "scale": inputs.case.scale,
        "output_final_state": True,
    }
    named["out"] = torch.empty_like(named["v"])
    if ranks.size == 1:
        return lambda: PREFILL[inputs.case.algorithm](**named)
    function = getattr(cula.dist, f"cula_{inputs.case.algorithm}_cp")
    return lambda: function(**named, sp_group=ranks.group, sp_splits=splits, method=method)


def _fla(inputs: Inputs, ranks: Ranks, _splits: list[int], own: slice, _method: str | None) -> Call:
    """Context parallelism is what its context asks for; final states it gives none."""
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    case = inputs.case
    named = {**_named(inputs, own), **keywords(inputs), "scale": case.options["scale"], "safe_gate": True}
    if ranks.size > 1:
        ends = torch.tensor([0, case.tokens])
        named["cp_context"] = build_cp_context(ends.to(ranks.device), ranks.group, cu_seqlens_cpu=ends)
    return lambda: chunk_kda(**named, state_v_first=True)


def _exchange(inputs: Inputs, ranks: Ranks) -> Call:
    """Of maps alone, and their composition, as a scan does it."""
    call = cula.dist.calls.Call("exchange", inputs.case.algorithm, inputs.q, inputs.k, inputs.v)
    message = Message.empty(call, inputs.case.batch)
    message.whole.zero_()
    transport = ProcessGroupTransport(Group(ranks.group, ranks.size, ranks.rank))
    return lambda: methods.exchange(transport, message, None)


def _rank(
    device: str,
    rank: int,
    sizes: list[int],
    store: str,
    cases: list,
    options: argparse.Namespace,
    report: Connection,
) -> None:
    torch.set_grad_enabled(False)
    named = {
        "store": dist.FileStore(store, sizes[-1]),
        "rank": rank,
        "world_size": sizes[-1],
        "timeout": TIMEOUT,
    }
    if device == "cuda":
        from cula.bench import fla

        fla.prepare()
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", **named, device_id=torch.device("cuda", rank))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // sizes[-1]))
        dist.init_process_group("gloo", **named)
    Rank(device, sizes, options, report).run(cases)
    report.close()
    dist.destroy_process_group()


def measured(
    device: str, sizes: list[int], cases: list[tuple[str, str, Case]], options: argparse.Namespace
) -> Iterator[Row | str]:
    """Rows as they come, and sentences about what failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        reports, processes = [], []
        for rank in range(sizes[-1]):
            report, theirs = context.Pipe(duplex=False)
            arguments = (device, rank, sizes, str(Path(folder) / "store"), cases, options, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            reports.append(report)
            processes.append(process)
        waiting = list(reports)
        while waiting:
            for report in multiprocessing.connection.wait(waiting):
                try:
                    yield report.recv()
                except EOFError:
                    waiting.remove(report)
        for rank, process in enumerate(processes):
            process.join()
            if process.exitcode:
                yield f"rank {rank} ended with {process.exitcode}"


def run(options: argparse.Namespace, chosen: Callable[[str, list], list] | None = None) -> list[Row]:
    """Measures, prints and writes. What fails is printed; where it is ours, the process fails in the end."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1
    sizes = [size for size in RANKS[kind] if size == 1 or size <= there or kind == "cpu"]
    headlines = HEADLINES if kind == "cuda" else CPU_HEADLINES
    cases = [(op, name, headlines[op, "prefill"][name]) for op, name in CASES[kind]]
    cases = [
        each
        for each in (chosen(kind, cases) if chosen else cases)
        if re.search(options.case, "/".join(each[:2]))
    ]
    device = gpu if kind == "cuda" else cpu
    device.prepare()
    head = {**machine.describe(device), "source_hash": machine.source_hash(*SOURCES)}
    whole = not (options.case or options.impl)
    output, rows, failed = options.output or (RESULTS if whole else None), [], False
    if kind == "cuda":
        torch.cuda.empty_cache()  # the ranks need the memory
    start = time.perf_counter()
    for row in measured(kind, sizes, cases, options):
        if isinstance(row, str):
            print(row, flush=True)
            failed |= ": fla failed" not in row
            continue
        rows.append(row)
        failed |= row.impl != "fla" and row.difference > SAME
        show(row, rows)
        if output is not None:
            path = results.write(output, f"{NAME}_x{sizes[-1]}", head, rows)
    if rows and output is not None:
        print(f"wrote {path}")
    print(f"{NAME}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise SystemExit("cula failed in some cases, see above")
    return rows


def time_of(row: Row) -> float:
    return row.call_ms if row.gpu_ms is None else row.gpu_ms


def show(row: Row, rows: list[Row]) -> None:
    """A line; beside it, how much faster than the same implementation on one GPU."""
    base = "fla" if row.impl == "fla" else "cula"
    one = [
        each for each in rows if (each.op, each.tokens, each.impl, each.gpus) == (row.op, row.tokens, base, 1)
    ]
    faster = f"x{time_of(one[0]) / time_of(row):.2f}" if one else ""
    exchange = "" if row.exchange_ms is None else f"  exchange {row.exchange_ms / time_of(row):.1%}"
    print(
        f"{row.op:9} {row.case:20} {row.impl:26} {time_of(row):9.3f} ms {faster:6} call {row.call_ms:.3f} ms"
        f"{exchange}  differs {row.difference:.1e}",
        flush=True,
    )
