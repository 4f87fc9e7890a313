# SPDX-License-Identifier: Apache-2.0
"""What a case's call has to give: the recurrence of ALGORITHM.md in float64, all heads and sequences at a
time.

It reads the call's numbers exactly as the library gets them. Nothing here comes from the library or the
tests' oracle.
"""

from __future__ import annotations

import numpy as np
import torch

from fuzz.case import Case
from fuzz.values import Values

# The largest number that a state or an output may have on the way, where one of them is stored in float16.
LARGEST_FP16 = 6e4


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def log_decay(values: Values) -> np.ndarray:
    """[B, T, HV, K or 1]."""
    case, tensors = values.case, values.tensors
    a = np.zeros((case.batch, case.tokens, case.value_heads, 1))
    if "g" in tensors:
        a = wide(tensors["g"])
        a = a if a.ndim == 4 else a[..., None]
        if case.gate != "log_decay":
            if "dt_bias" in tensors:
                a = a + wide(tensors["dt_bias"]).reshape(case.value_heads, -1)
            rate = np.exp(wide(tensors["A_log"]))[:, None] if "A_log" in tensors else 1.0
            a = -rate * softplus(a) if case.gate == "softplus" else case.lower_bound * sigmoid(rate * a)
    if "decay" in tensors:
        a = a - np.abs(wide(tensors["decay"]))[:, None]
    return a


def write_strength(values: Values) -> np.ndarray:
    """[B, rows of v, HV, V or 1]."""
    case = values.case
    beta = wide(values.tensors["beta"])
    if case.beta_is_logit:
        beta = sigmoid(beta) * (2 if case.allow_neg_eigval and not case.erases else 1)
    return beta if beta.ndim == 4 else beta[..., None]


def erase_strength(values: Values) -> np.ndarray:
    """[B, rows of v, HV, K]."""
    erase = wide(values.tensors["erase"])
    if values.case.beta_is_logit:
        erase = sigmoid(erase) * (2 if values.case.allow_neg_eigval else 1)
    return erase


class Tokens:
    """The inputs of all sequences side by side, padded with tokens that change nothing: q and alpha
    [N, L, HV, ..], and so are a_key and b_key; k, v, beta, erase and stretch [N, L, n, HV, ..], with n writes
    of each token."""

    def __init__(self, values: Values) -> None:
        case = values.case
        q, k, v = (wide(values.tensors[name]) for name in "qkv")
        lengths = np.sqrt((k * k).sum(-1) + 1e-6)
        if case.qk_l2norm:
            q, k = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6), k / lengths[..., None]
        # Chunks put the inverse norm of a key to what it writes, which in float16 has to hold that.
        stretch = np.where((k != 0).any(-1), 1 / lengths, 0) if case.qk_l2norm else np.ones_like(lengths)
        self.stretch = self.writes(case, np.repeat(stretch, case.ratio, axis=2))
        q, k = (np.repeat(x, case.ratio, axis=2) for x in (q, k))
        self.q, self.k, self.v = self.rows(case, q), self.writes(case, k), self.writes(case, v)
        self.alpha = self.rows(case, np.exp(log_decay(values)), 1.0)
        self.beta = self.writes(case, write_strength(values)) if case.delta else None
        self.erase = self.writes(case, erase_strength(values)) if case.erases else None
        self.low_rank = None
        if case.low_rank:
            self.low_rank = [self.rows(case, wide(values.tensors[name])) for name in ("a_key", "b_key")]
        self.scale = case.key_dim**-0.5 if case.scale is None else case.scale

    @staticmethod
    def rows(case: Case, x: np.ndarray, fill: float = 0.0) -> np.ndarray:
        if not case.packed:
            return x
        rows = np.full((case.sequences, case.longest, *x.shape[2:]), fill)
        for n, (_, begin, end) in enumerate(case.spans()):
            rows[n, : end - begin] = x[0, begin:end]
        return rows

    @classmethod
    def writes(cls, case: Case, x: np.ndarray) -> np.ndarray:
        return cls.rows(case, x.reshape(x.shape[0], case.tokens, case.householders, *x.shape[2:]))

    def largest_write(self, t: int, state: np.ndarray) -> float:
        """No smaller than what token t writes: before and after its write strength, and times its key's 1 /
        norm."""
        largest = 0.0
        for j in range(self.v.shape[2]):
            k, u, stretch = self.k[:, t, j], np.abs(self.v[:, t, j]), self.stretch[:, t, j, :, None]
            if self.erase is not None:
                e = self.erase[:, t, j] * k
                u = np.maximum(u, np.abs(self.beta[:, t, j]) * u + np.abs((state @ e[..., None])[..., 0]))
                stretch = np.maximum(1, stretch)
            elif self.beta is not None:
                u = u + np.abs((state @ k[..., None])[..., 0])
                stretch = np.maximum(1, np.abs(self.beta[:, t, j]) * np.maximum(1, stretch))
            if self.low_rank is not None:
                u = np.maximum(u, np.abs(self.found(t, state)))
            largest = max(largest, float((u * stretch).max(initial=0)))
            state = self.write(t, j, self.decayed(t, state) if j == 0 else state, self.v[:, t, j])
        return largest

    @property
    def mixes(self) -> bool:
        """Whether M of a map is a matrix."""
        return self.beta is not None or self.low_rank is not None

    def found(self, t: int, state: np.ndarray) -> np.ndarray:
        """What a_key of token t reads of the states before it, [N, HV, V]."""
        return (state @ self.low_rank[0][:, t, ..., None])[..., 0]

    def decayed(self, t: int, state: np.ndarray) -> np.ndarray:
        return state * self.alpha[:, t, :, None, :]

    def write(self, t: int, j: int, state: np.ndarray, v: np.ndarray, reads_only: bool = False) -> np.ndarray:
        """The states [N, HV, V, K] after write j of token t. reads_only: v is zero, of any number of value
        channels."""
        k, u = self.k[:, t, j], v
        if self.erase is not None:
            e = self.erase[:, t, j] * k
            u = (0 if reads_only else self.beta[:, t, j] * v) - (state @ e[..., None])[..., 0]
        elif self.beta is not None:
            u = self.beta[:, t, j] * (v - (state @ k[..., None])[..., 0])
        return state + u[..., None] * k[..., None, :]

    def step(self, t: int, state: np.ndarray, reads_only: bool = False) -> np.ndarray:
        """The states after token t. reads_only: of values of zero, as many as the states have."""
        before, state = state, self.decayed(t, state)
        if self.low_rank is not None:
            state = state + self.found(t, before)[..., None] * self.low_rank[1][:, t, :, None, :]
        for j in range(self.v.shape[2]):
            v = np.zeros(state.shape[:3]) if reads_only else self.v[:, t, j]
            state = self.write(t, j, state, v, reads_only)
        return state


def start(values: Values) -> np.ndarray:
    """The states that sequences start from."""
    case, base = values.case, wide(values.base).copy()
    for n in range(case.sequences):
        if case.state == "none" or (case.has_initial is not None and not case.has_initial[n]):
            base[n] = 0
    return base


class Expected:
    """Everything that a call may return, by name; for verify also the state after each token.

    o [B, T, HV, V]; final [N, HV, V, K]; chunks: (sequence, chunk): state; passing: (sequence, tokens):
    state; snapshots [N, L, HV, V, K]; m, b; map_final: m applied to the initial state, plus b.
    """

    def __init__(self, values: Values) -> None:
        case = values.case
        self.case, self.largest, self.size = case, 0.0, 1.0
        with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
            self._run(values, Tokens(values))

    def _run(self, values: Values, tokens: Tokens) -> None:
        case = self.case
        N, L, _, HV, V = tokens.v.shape
        state = start(values)
        if case.pass_name == "segment":
            self._map(tokens)
            if not case.keep:
                return
        track = "float16" in (case.dtype, case.state_dtype, case.checkpoint_dtype, case.snapshot_dtype)
        rows = np.zeros((N, L, HV, V))
        tree, states = case.parents is not None, [state]
        self.passing = {}
        wanted = {(n, t) for n, t, slot in case.plan or () if slot >= 0}
        if case.chunk_size:
            wanted |= {
                (n, t) for n, length in enumerate(case.lengths) for t in range(0, length, case.chunk_size)
            }
        self._keep(wanted, 0, state)
        # The largest number that goes in; at least 1 (judge.VANISHING).
        self.size = max(1.0, np.abs(state).max(initial=0), np.abs(tokens.v).max(initial=0))
        if track:
            self.largest = np.abs(state).max(initial=0)
        every = np.arange(N)
        for t in range(L):
            if tree:
                parents = [max(case.parents[n][t], -1) if t < case.lengths[n] else -1 for n in range(N)]
                state = np.stack(states)[np.array(parents) + 1, every] if N else state
            if track:
                self.largest = max(self.largest, tokens.largest_write(t, state))
            state = tokens.step(t, state)
            rows[:, t] = tokens.scale * (state @ tokens.q[:, t, ..., None])[..., 0]
            if case.pass_name == "verify":
                states.append(state)
            self._keep(wanted, t + 1, state)
            if track:
                self.largest = max(
                    self.largest, np.abs(state).max(initial=0), np.abs(rows[:, t]).max(initial=0)
                )
        self.final = state
        if case.pass_name == "verify":
            self.snapshots = np.stack(states[1:], axis=1) if L else np.zeros((N, 0, *state.shape[1:]))
        self.o = np.zeros((case.batch, case.tokens, HV, V))
        for n, (b, begin, end) in enumerate(case.spans()):
            if not case.skipped(n):
                self.o[b, begin:end] = rows[n, : end - begin]

    def _keep(self, wanted: set[tuple[int, int]], done: int, state: np.ndarray) -> None:
        for n, t in wanted:
            if t == done:
                self.passing[n, t] = state[n]

    def _map(self, tokens: Tokens) -> None:
        """M column by column: where the recurrence without values takes the unit vectors."""
        N, L, _, HV, V = tokens.v.shape
        K = tokens.k.shape[-1]
        self.b = np.zeros((N, HV, V, K))
        units = np.broadcast_to(np.eye(K), (N, HV, K, K))
        self.m = np.ones((N, HV, K))
        for t in range(L):
            if self.case.dtype == "float16":
                self.largest = max(self.largest, tokens.largest_write(t, self.b))
            self.b = tokens.step(t, self.b)
            if tokens.mixes:
                units = tokens.step(t, units, reads_only=True)
            self.m = self.m * tokens.alpha[:, t]
        if tokens.mixes:
            self.m = units.swapaxes(-1, -2).copy()

    def everything(self) -> list[np.ndarray]:
        named = [getattr(self, name) for name in ("m", "b", "o", "final", "snapshots") if hasattr(self, name)]
        return [*named, *getattr(self, "passing", {}).values()]

    def in_range(self) -> bool:
        """Whether all of it fits the dtypes that store it."""
        finite = all(np.isfinite(x).all() for x in self.everything())
        return finite and self.largest <= LARGEST_FP16
