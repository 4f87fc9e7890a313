# SPDX-License-Identifier: Apache-2.0
"""A `Case`: everything about a call except its numbers. `draw.py` makes one of a seed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import cula
from cula import _ops

FLOAT8 = "float8_e4m3fn"  # of states alone, with a scale for each row

# algorithm: (decay, update)
FAMILY = {row.name: (row.decay, row.update) for row in cula.algorithms().values()}
OF_WRITES = ("k", "v", "beta", "erase")  # the tensors with a row for each write of a token
PASSES = ("prefill", "decode", "verify", "segment", "split", "backward")


# The tensors of tokens that a call may have.
OF_TOKENS = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")


@dataclass(frozen=True)
class Case:
    seed: int
    pass_name: str  # "split": a prefill whose tokens are cut in two, with the state handed over
    algorithm: str
    dtype: str  # of q, k, v
    lengths: tuple[int, ...]  # tokens of each sequence
    packed: bool  # with cu_seqlens; else a batch of equal lengths
    slack: int  # packed: tokens beyond the last sequence
    heads: int
    ratio: int  # value heads per head
    key_dim: int
    value_dim: int
    householders: int = 1  # writes of a token
    cu_dtype: str = "int32"
    scale: float | None = None
    qk_l2norm: bool = False
    deterministic: str | bool | None = None
    out: str = ""  # dtype of a preallocated o, "" for none
    layouts: tuple[tuple[str, str], ...] = ()  # tensor: how it lies in memory
    expanded: tuple[tuple[str, int], ...] = ()  # tensor: the dimension that has stride 0
    rows_along_tokens: bool = False  # decode: [1, N] instead of [N, 1]
    repeat: bool = False  # call twice and compare the bits
    automatic: bool = False  # also call without naming a backend
    threads: int = 1  # on a CPU

    # numbers
    keys: str = "random"  # collinear, sparse (rows of zeros)
    key_size: float = 1.0
    query_size: float = 1.0
    value_size: float = 1.0
    state_size: float = 1.0
    mixed_sizes: bool = False  # another power of ten for each sequence
    edge: bool = False  # as large as the dtypes hold
    cancelling: bool = False

    # gates and write strengths
    gate: str = "log_decay"
    decay: str = "mild"
    gate_dtype: str = "float32"
    gate_per_head: bool = False  # kda with g [B, T, HV]
    lower_bound: float = -5.0
    A_log: tuple[float, float] | None = None  # range
    dt_bias: float | None = None  # deviation
    flat_bias: bool = False
    head_decay: bool = False  # simple_gla: a constant per head on top
    beta: str = "random"
    erase: str = "random"
    rank_one: str = "removing"  # a_key and b_key: apart, reflecting
    beta_dtype: str = "float32"  # and erase's, a_key's and b_key's
    beta_is_logit: bool = False
    beta_per_value: bool = False
    allow_neg_eigval: bool = False

    # states
    state: str = "none"  # dense, pool (in place), readonly (a pool that is only read)
    state_dtype: str = "float32"
    v_first: bool = True  # the argument state_v_first
    transposed: bool = False  # the other one of the two matrix dimensions is contiguous
    slot_pad: int = 0
    head_pad: int = 0
    slots: int = 0
    initial: tuple[int, ...] | None = None
    final: tuple[int, ...] | None = None
    has_initial: tuple[bool, ...] | None = None
    null_index: int = -1
    index_dtype: str = "int32"  # "mixed": each index tensor another
    index_strided: bool = False
    output_final: bool = True

    # prefill
    plan: tuple[tuple[int, int, int], ...] | None = None
    plan_in_pool: bool = False
    checkpoint_slots: int = 0
    checkpoint_dtype: str = "float32"
    chunk_size: int = 0  # of h, 0 for none
    cut: int = 0  # split

    # segment
    segment_out: str = ""  # "", "both", "b"
    keep: bool = False

    # verify
    table: tuple[tuple[int, ...], ...] | None = None  # state_indices
    accepted: tuple[int, ...] | None = None
    disable_update: bool = False
    parents: tuple[tuple[int, ...], ...] | None = None
    snapshot_slots: tuple[int, int] | None = None  # slots, S
    snapshot_indices: tuple[int, ...] | None = None
    snapshot_dtype: str = "float32"

    # backward
    # "out", "default": the operator's overloads; "autograd": the algorithm's function; "kept": the same with
    # disable_recompute.
    through: str = ""
    wanted: tuple[str, ...] = ()  # what has its gradient computed
    d_o: str = ""  # its dtype, "" for none
    d_final: str = ""  # that of d_final_state, likewise
    outer_size: float = 1.0  # of both
    wide_gradients: bool = False  # "out": float32, whatever their inputs are

    @property
    def value_heads(self) -> int:
        return self.heads * self.ratio

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def batch(self) -> int:
        return 1 if self.packed else len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.slack if self.packed else self.lengths[0]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def delta(self) -> bool:
        """Whether writes depend on the state by a write strength."""
        return _answer(self, additive=False, delta=True, erase=True, product=True, dplr=False)

    @property
    def erases(self) -> bool:
        """Whether erase strengths are apart from write strengths."""
        return _answer(self, additive=False, delta=False, erase=True, product=False, dplr=False)

    @property
    def low_rank(self) -> bool:
        """Whether two more keys read the state before its decay and write what was read."""
        return _answer(self, additive=False, delta=False, erase=False, product=False, dplr=True)

    @property
    def mixes(self) -> bool:
        """Whether M of a map is a matrix."""
        return self.delta or self.low_rank

    def rows(self, name: str, begin: int, end: int) -> slice:
        """The rows that a tensor has for the tokens from `begin` to `end`."""
        n = self.householders if name in OF_WRITES else 1
        return slice(begin * n, end * n)

    def differentiable(self) -> tuple[str, ...]:
        """What has a gradient."""
        absent = {
            "g": FAMILY[self.algorithm][0] not in ("channel", "token"),
            "beta": not self.delta,
            "erase": not self.erases,
            "a_key": not self.low_rank,
            "b_key": not self.low_rank,
            "A_log": self.A_log is None,
            "dt_bias": self.dt_bias is None,
            "initial_state": self.state == "none",
        }
        return tuple(name for name in _ops.GRADIENTS if not absent.get(name))

    def gradient_dtype(self, name: str) -> str:
        """What a gradient is stored in."""
        if name in ("A_log", "dt_bias") or self.wide_gradients:
            return "float32"
        if name == "initial_state" and self.through == "default":
            return "float64" if self.dtype == "float64" else "float32"
        given = {"g": self.gate_dtype, "beta": self.beta_dtype, "initial_state": self.state_dtype}
        given |= dict.fromkeys(("erase", "a_key", "b_key"), self.beta_dtype)
        return given.get(name, self.dtype)

    def spans(self) -> list[tuple[int, int, int]]:
        """(row of the batch, first token, end) of each sequence."""
        if not self.packed:
            return [(n, 0, length) for n, length in enumerate(self.lengths)]
        ends = [sum(self.lengths[: n + 1]) for n in range(len(self.lengths))]
        return [(0, end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def is_null(self, slot: int) -> bool:
        return slot < 0 or slot == self.null_index

    def base(self, n: int) -> int:
        """The slot that sequence n starts from."""
        if self.initial is not None:
            return self.initial[n]
        if self.table is not None:
            if not self.table[n]:
                return -1  # no slot is named, and there are no tokens
            return self.table[n][(1 if self.accepted is None else self.accepted[n]) - 1]
        return n

    def end(self, n: int) -> int:
        """The slot that sequence n ends in: prefill and decode."""
        return self.base(n) if self.final is None else self.final[n]

    def skipped(self, n: int) -> bool:
        """A null row. Without indices a slot is meant literally."""
        if self.state == "none":
            return False
        by_index = self.initial is not None or self.table is not None
        return (by_index and self.is_null(self.base(n))) or (
            self.final is not None and self.is_null(self.final[n])
        )

    def starts(self, n: int) -> bool:
        """Whether sequence n reads a state."""
        return (
            self.state != "none" and not self.skipped(n) and (self.has_initial is None or self.has_initial[n])
        )

    def writes(self, n: int) -> list[int]:
        """The slots of the pool that sequence n writes, in order."""
        if self.state != "pool" or self.skipped(n):
            return []
        if self.pass_name != "verify":
            return [self.end(n)]
        table = [] if self.table is None or self.disable_update else self.table[n][: self.lengths[n]]
        return [slot for slot in table if not self.is_null(slot)]

    def forks(self) -> list[int]:
        """The sequences that start from a slot which another one writes."""
        writer = {slot: n for n in range(self.sequences) for slot in self.writes(n)}
        return [n for n in range(self.sequences) if self.starts(n) and writer.get(self.base(n), n) != n]

    def chained(self) -> bool:
        """Whether some fork cannot be settled: its own first slot is one that a third sequence starts
        from."""
        for n in self.forks():
            first = (*self.writes(n), None)[0]
            others = [m for m in range(self.sequences) if m != n and self.starts(m)]
            if first is None and self.lengths[n]:
                return True
            if first is not None and any(self.base(m) == first for m in others):
                return True
        return False

    def but(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)

    def brief(self) -> str:
        """The fields that are not the defaults."""
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return " ".join(f"{field.name}={value}" for field, value in fields if value != field.default)


def _answer(case: Case, **answers: bool) -> bool:
    """That of the case's update rule; one that is not listed raises."""
    return answers[FAMILY[case.algorithm][1]]
