# SPDX-License-Identifier: Apache-2.0
"""Which kernel would run, and why the others would not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import _fla, _ops, _passes
from ._build import build_info
from ._family import FAMILY


class Saving(NamedTuple):
    """What a kernel keeps of a prefill for the backward pass: `bytes` of each chunk of `chunk_tokens` tokens
    and each value head, of at most `most_chunks` chunks."""

    chunk_tokens: int
    bytes: int
    most_chunks: int


class Row(NamedTuple):
    """A kernel of the registry: `verdict` is "chosen", "yes" (it would do) or "no" because of `reason`.

    microseconds: of the device, as the library predicts them where it has several ways to run a call, for
    sequences of equal length; of the target's plain name, those of the way that it takes. saving: with
    `disable_recompute`, what the kernel keeps, or reads in a backward pass."""

    target: str
    verdict: str
    reason: str
    microseconds: float | None = None
    saving: Saving | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """The registry's rows for one problem, in order of preference. Iterates as rows, prints as a table."""

    problem: str
    rows: tuple[Row, ...]
    # What a build without CUDA kernels has to say of a problem on a GPU, and what disable_recompute keeps.
    note: str = ""

    @property
    def chosen(self) -> str | None:
        """The target that would run, None if there is none."""
        return next((row.target for row in self.rows if row.verdict == "chosen"), None)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __repr__(self) -> str:
        width = max(len("target"), *(len(row.target) for row in self.rows))
        lines = [f"  {'target':{width}}  {'runs':6}  {'us':>7}  why not"]
        for row in self.rows:
            time = "" if row.microseconds is None else f"{row.microseconds:.0f}"
            lines.append(f"  {row.target:{width}}  {row.verdict:6}  {time:>7}  {row.reason}".rstrip())
        return "\n".join([self.problem, *lines, *([self.note] if self.note else [])])


def explain(
    algorithm: str = "kda",
    pass_name: str = "prefill",
    *,
    batch: int = 1,
    tokens: int = 8192,
    sequences: int | None = None,
    heads: int = 32,
    value_heads: int | None = None,
    key_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    gate: str = "log_decay",
    lower_bound: float = -5.0,
    varlen: bool = False,
    beta_per_value: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    checkpoints: bool = False,
    chunk_states: bool = False,
    tree: bool = False,
    chunk_size: int = 64,
    deterministic: bool | str | None = None,
    device: torch.device | str | None = None,
    disable_recompute: bool = False,
    writes: int = 1,
) -> Explanation:
    """Every kernel of the registry for a problem: the one that would run, the microseconds that the ways to
    run it are predicted to take on the device, where there is a model, and why others cannot run it, in a
    sentence each.

    algorithm: a name of `cula.algorithms()`.
    pass_name: prefill, decode, verify, segment or backward.
    gate: log_decay, softplus or bounded.
    device: a device, or an architecture that need not be here, `"sm_90"`; None is the current GPU, or else
    the CPU. The other arguments have the names and meanings of the calls they describe (`cula.api`). In a
    backward pass the gradient of o counts as one of `dtype`.
    disable_recompute: of a prefill, which kernel keeps what for the backward pass, and of a backward pass,
    which kernels read that. Where none is chosen, a call runs as without it.
    writes: of a token; more than one for algorithms that take several alone.
    """
    place = _place(device)
    _check_types(str, algorithm=algorithm, pass_name=pass_name, gate=gate)
    _fla.check_sizes(
        "explain", batch=batch, tokens=tokens, heads=heads, key_dim=key_dim, chunk_size=chunk_size,
        writes=writes,
    )  # fmt: skip
    optional = {"sequences": sequences, "value_heads": value_heads, "value_dim": value_dim}
    _fla.check_sizes("explain", **{name: value for name, value in optional.items() if value is not None})
    _check_types(torch.dtype, dtype=dtype, state_dtype=state_dtype)
    _check_types(bool, varlen=varlen, beta_per_value=beta_per_value, checkpoints=checkpoints, tree=tree)
    _check_types(bool, chunk_states=chunk_states, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    _check_types(bool, disable_recompute=disable_recompute)
    if disable_recompute and pass_name not in ("prefill", "backward"):
        raise ValueError(
            f"explain: disable_recompute must be False for {pass_name}: it belongs to prefill and backward"
        )
    if isinstance(lower_bound, bool) or not isinstance(lower_bound, float | int):
        raise TypeError(f"explain: lower_bound must be of type float, got {_ops.type_name(lower_bound)}")
    if not -math.inf < lower_bound < 0:
        raise ValueError(f"explain: lower_bound must be negative and finite, got {lower_bound}")
    if algorithm in FAMILY and not FAMILY[algorithm].takes_several_writes and writes != 1:
        raise ValueError(f"explain: writes must be 1 for {algorithm}, got {writes}")
    if not 1 <= writes <= 2**24:
        raise ValueError(f"explain: writes must be from 1 to 2^24, got {writes}")
    batch_invariant = _passes.is_batch_invariant(deterministic)
    value_heads = heads if value_heads is None else value_heads
    value_dim = key_dim if value_dim is None else value_dim
    sequences = batch if sequences is None else sequences
    try:
        text = _ops.explain(
            pass_name, algorithm, place, batch=batch, tokens=tokens, sequences=sequences, heads=heads,
            value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, dtype=_name(dtype),
            state_dtype=_name(state_dtype), gate=gate, lower_bound=lower_bound, varlen=varlen,
            beta_per_value=beta_per_value, checkpoints=checkpoints, chunk_states=chunk_states, tree=tree,
            chunk_tokens=chunk_size, batch_invariant=batch_invariant, costs="",
            qk_l2norm=use_qk_l2norm_in_kernel, saves=disable_recompute, writes=writes,
        )  # fmt: skip
    except RuntimeError as error:
        if (reason := str(error).partition("cula: device count: ")[2]) == "":
            raise
        raise ValueError(
            "explain: device must be one that the CUDA driver finds, or an architecture such as sm_90, "
            f"which needs no GPU; got {place} ({reason.splitlines()[0]})"
        ) from None
    shape = f"B={batch} T={tokens} H={heads} HV={value_heads} K={key_dim} V={value_dim}"
    problem = f"{algorithm} {pass_name} on {place}: {shape}, {_name(dtype)}, {_name(state_dtype)} state"
    rows = tuple(_row(line) for line in text.splitlines())
    notes = [] if place == "cpu" or build_info().cuda else [build_info().note()]
    if disable_recompute:
        problem += ", disable_recompute"
        notes += _saving_note(rows, tokens, writes, sequences, value_heads, varlen)
    return Explanation(problem, rows, "\n".join(notes))


def _saving_note(
    rows: tuple[Row, ...], tokens: int, writes: int, sequences: int, value_heads: int, varlen: bool
) -> Iterator[str]:
    chosen = next((row for row in rows if row.verdict == "chosen"), None)
    if chosen is None or chosen.saving is None:
        yield "nothing is kept: the backward pass computes all again"
        return
    size, kept = chosen.saving.chunk_tokens, chosen.saving.bytes
    count = tokens * writes
    chunks = count // size + sequences if varlen else -(-count // size) * sequences
    unit = "tokens" if writes == 1 else "writes"
    yield (
        f"{chosen.target}: {kept / 2**10:.1f} KiB are kept of each chunk of {size} {unit} and value head, "
        f"{chunks * value_heads * kept / 2**20:.0f} MiB in all"
    )


def _row(line: str) -> Row:
    target, verdict, reason, microseconds, saving = line.split("\t")
    time = float(microseconds) if microseconds else None
    if not saving:
        return Row(target, verdict, reason, time)
    chunk_tokens, words, most_chunks = map(int, saving.split())
    return Row(target, verdict, reason, time, Saving(chunk_tokens, 4 * words, most_chunks))


def _check_types(kind: type, **given: object) -> None:
    for argument, value in given.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"explain: {argument} must be of type {kind.__name__}, got {_ops.type_name(value)}"
            )


def _place(device: torch.device | str | None) -> str:
    if isinstance(device, str) and device.startswith("sm_"):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"explain: device must be a device or an architecture such as sm_90, got {device!r}"
        ) from None
    if device.type != "cuda" or device.index is not None:
        return str(device)
    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
