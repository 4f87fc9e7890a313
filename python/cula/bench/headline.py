# SPDX-License-Identifier: Apache-2.0
"""The rows of `python -m cula.bench`: which calls are measured on a device, and how large they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .. import explain
from . import cpu
from .cases import Case, decode_case, prefill_case
from .impls import EAGER_CHUNK, EAGER_RECURRENT, OURS, Impl, inputs_of

PREFILLED = ("kda", "gdn", "gla", "lightning")
DECODED = ("kda", "gdn", "lightning")

CPU_TOKENS = (4096, 1024, 256)
CPU_HEADS = 16
CPU_IMPLS = (OURS, EAGER_CHUNK, EAGER_RECURRENT)
CALLS_PER_ROW = cpu.MIN_CALLS + 2  # the first call, the timed ones, and some slack

GPU_TOKENS = 8192
GPU_HEADS = (64, 32, 16, 8)
# What a step of training holds at most, in units of its q in bfloat16: inputs, gradients, states, copies.
GPU_STREAMS = 64


@dataclass(frozen=True)
class Entry:
    """A row of the table: a pass (prefill, decode, train) of a case, and the case's name."""

    pass_name: str
    name: str
    case: Case

    @property
    def algorithm(self) -> str:
        return self.case.algorithm

    def target(self, device: str) -> str | None:
        """The kernel that runs, of a step of training its backward pass."""
        case = self.case
        return explain(
            case.algorithm,
            "backward" if self.pass_name == "train" else self.pass_name,
            batch=case.batch,
            tokens=case.tokens,
            sequences=case.sequences,
            heads=case.heads,
            value_heads=case.value_heads,
            key_dim=case.key_dim,
            value_dim=case.value_dim,
            dtype=case.dtype,
            gate=case.gate,
            lower_bound=case.lower_bound,
            use_qk_l2norm_in_kernel=case.qk_l2norm,
            device=device,
        ).chosen


def _entries(heads: dict[str, tuple[int, int]], tokens: int, rows: int, decode_heads: int) -> list[Entry]:
    """`heads`: those of q and k, and those of v, of each algorithm."""

    def whole(pass_name: str) -> Iterable[Entry]:
        for algorithm in PREFILLED:
            of_k, of_v = heads[algorithm]
            name = f"T{tokens}-H{of_k}" if of_k == of_v else f"T{tokens}-{of_k}-{of_v}"
            yield Entry(pass_name, name, prefill_case(algorithm, (tokens,), of_k, of_v))

    decode = [
        Entry("decode", f"N{rows}-H{decode_heads}", decode_case(algorithm, rows, decode_heads))
        for algorithm in DECODED
    ]
    return [*whole("prefill"), *decode, *whole("train")]


def cpu_entries(tokens: int) -> list[Entry]:
    return _entries(dict.fromkeys(PREFILLED, (CPU_HEADS, CPU_HEADS)), tokens, rows=8, decode_heads=32)


def gpu_entries(free_bytes: int) -> list[Entry]:
    """The heads of the repository's tables, or fewer where the memory is small."""
    width = 2 * 128 * GPU_TOKENS * GPU_STREAMS  # bytes for each head
    most = next((heads for heads in GPU_HEADS if heads * width <= free_bytes), GPU_HEADS[-1])
    heads = {
        "kda": (most, most),
        "gdn": (most // 4, most),
        "gla": (most // 2, most // 2),
        "lightning": (most, most),
    }
    return _entries(heads, GPU_TOKENS, rows=32, decode_heads=32)


def cpu_tokens(
    seconds: float, *, quick: bool = False, time_of: Callable[[Impl, Entry], float] | None = None
) -> int:
    """The longest sequences whose rows are through in so many seconds. Linear attention takes time linear in
    the length, so calls of the shortest ones tell; and KDA takes the most."""
    sizes = CPU_TOKENS[1:] if quick else CPU_TOKENS
    taken = len(PREFILLED) * sum(
        (time_of or _shortest)(impl, entry)
        for entry in cpu_entries(sizes[-1])
        for impl in CPU_IMPLS
        if entry.algorithm == "kda"
        and entry.pass_name != "decode"
        and impl.takes(entry.pass_name, entry.case)
    )
    fitting = (tokens for tokens in sizes if CALLS_PER_ROW * taken * tokens / sizes[-1] <= seconds)
    return next(fitting, sizes[-1])


def _shortest(impl: Impl, entry: Entry) -> float:
    """Seconds of the shortest of three calls after the first."""
    taken = []
    with torch.no_grad():
        call = impl.bound(entry.pass_name, inputs_of(entry.pass_name, entry.case, "cpu"))
        call()
        for _ in range(3):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return min(taken)
