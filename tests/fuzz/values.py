# SPDX-License-Identifier: Apache-2.0
"""The numbers of a case, as CPU tensors in the dtypes of the call; what the oracle reads and every backend
gets."""

from __future__ import annotations

import numpy as np
import torch

from cula_testing.float8 import dequantised, quantised
from fuzz.case import FAMILY, FLOAT8, Case

NAN = float("nan")


def to_torch(x: np.ndarray, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    # numpy gives an array without elements strides of 0.
    return torch.from_numpy(np.ascontiguousarray(x)).to(kind) if x.size else torch.empty(x.shape, dtype=kind)


class Values:
    """q, k, v, g, decay, beta, erase, a_key, b_key, A_log, dt_bias, d_o; base, the state [N, HV, V, K] that
    each sequence starts from; and d_final, the gradient of the state that it ends in."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = np.random.default_rng(case.seed)
        B, T, H, HV, K, V = (
            case.batch,
            case.tokens,
            case.heads,
            case.value_heads,
            case.key_dim,
            case.value_dim,
        )
        decay, _ = FAMILY[case.algorithm]
        self.tensors: dict[str, torch.Tensor] = {}
        self._queries_keys_values(B, T, H, HV, K, V)
        if decay in ("channel", "token"):
            per_channel = decay == "channel" and not case.gate_per_head
            g = self._gates((B, T, HV, K) if per_channel else (B, T, HV))
            self.tensors["g"] = to_torch(g, case.gate_dtype)
            if case.A_log is not None:
                self.tensors["A_log"] = to_torch(self.random.uniform(*case.A_log, HV), "float32")
            if case.dt_bias is not None:
                shape = (HV, K) if per_channel else (HV,)
                self.tensors["dt_bias"] = to_torch(
                    case.dt_bias * self.random.standard_normal(shape), "float32"
                )
        if decay == "head" or case.head_decay:
            self.tensors["decay"] = to_torch(self._constants(HV), "float32")
        if case.delta:
            shape = (B, T * case.householders, HV, *((V,) if case.beta_per_value else ()))
            self.tensors["beta"] = to_torch(self._strengths(case.beta, shape), case.beta_dtype)
        if case.erases:
            shape = (B, T * case.householders, HV, K)
            self.tensors["erase"] = to_torch(self._strengths(case.erase, shape), case.beta_dtype)
        if case.low_rank:
            a, b = self._low_rank_keys((B, T, HV, K))
            self.tensors |= {"a_key": to_torch(a, case.beta_dtype), "b_key": to_torch(b, case.beta_dtype)}
        if case.d_o:
            self.tensors["d_o"] = to_torch(
                case.outer_size * self.random.standard_normal((B, T, HV, V)), case.d_o
            )
        for name, dim in case.expanded:
            x = self.tensors.get(name)
            if x is not None and x.shape[dim] > 0:
                self.tensors[name] = x.narrow(dim, 0, 1).expand(x.shape)
        states = (
            self.random.standard_normal((case.sequences, HV, V, K))
            * self.state_sizes[:, None, None, None]
            / 4
        )
        if case.state != "none":
            first: dict[int, int] = {}  # rows that start from one slot start from one state
            states = states[[first.setdefault(case.base(n), n) for n in range(case.sequences)]]
        # Codes and scales of states of float8, of which base is what they say.
        self.stored: tuple[torch.Tensor, torch.Tensor] | None = None
        if case.state_dtype == FLOAT8:
            self.stored = quantised(to_torch(states, "float32"))
            self.base = dequantised(*self.stored)
        else:
            self.base = to_torch(states, case.state_dtype)
        self.d_final: torch.Tensor | None = None
        if case.d_final:
            d_final = case.outer_size * self.random.standard_normal((case.sequences, HV, V, K)) / 4
            self.d_final = to_torch(d_final, case.d_final)

    def _queries_keys_values(self, B: int, T: int, H: int, HV: int, K: int, V: int) -> None:
        case, random = self.case, self.random
        R = T * case.householders
        q, k, v = (random.standard_normal(shape) for shape in ((B, T, H, K), (B, R, H, K), (B, R, HV, V)))
        if case.keys == "collinear" and T:
            k = np.broadcast_to(k[:, :1], k.shape)
            q = k[:, :T] + random.standard_normal(q.shape) / 8
        if case.cancelling:
            shared = np.repeat(k, case.ratio, axis=2)
            v = np.einsum("bthk,hvk->bthv", shared, random.standard_normal((HV, V, K))) + 1e-3 * v
        if not case.qk_l2norm:
            q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        value_size, state_size = case.value_size, case.state_size
        if case.edge:
            value_size = 2e4 if "float16" in (case.dtype, case.state_dtype) else 1e18
            value_size, state_size = value_size / max(1.0, np.abs(v).max(initial=0)), value_size / 8
        sizes = np.ones((2, case.sequences))
        if case.mixed_sizes:
            sizes = 10 ** random.uniform(-2, 2, sizes.shape)
        self.state_sizes = state_size * sizes[0]
        q, k, v = case.query_size * q, case.key_size * k, value_size * v
        for (b, begin, end), value, query in zip(case.spans(), *sizes, strict=True):
            v[b, case.rows("v", begin, end)] *= value
            q[b, begin:end] *= query
        if case.keys == "sparse":
            for x in (q, k, v):
                x[random.random(x.shape[:-1]) < 0.3] = 0
        self.tensors |= {name: to_torch(x, case.dtype) for name, x in (("q", q), ("k", k), ("v", v))}

    def _low_rank_keys(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """What a reads, along a direction, is removed by the channels' shares of it; added to what is along
        another direction; or, in some tokens, removed twice."""
        random = self.random
        along, other = (random.standard_normal(shape) for _ in range(2))
        if self.case.keys == "collinear":
            along = np.broadcast_to(along[:, :1], shape)
        along, other = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (along, other))
        match self.case.rank_one:
            case "removing":
                return -along, along * self._strengths(self.case.erase, shape)
            case "apart":
                return along, other * 0.3
            case kind:
                assert kind == "reflecting"
                return -along, along * np.where(random.random((*shape[:3], 1)) < 0.1, 2.0, 1.0)

    def _gates(self, shape: tuple[int, ...]) -> np.ndarray:
        """Log decays, or raw gates that make about the named ones."""
        random, raw = self.random, self.case.gate != "log_decay"
        normal = random.standard_normal(shape)
        if raw:
            kinds = {
                "mild": normal,
                "slow": normal - 4,
                "zero": np.full(shape, -1000.0),
                "tiny": np.full(shape, -14.0),
                "strong": 20 * random.random(shape),
                "extreme": np.full(shape, 1000.0),
            }
        else:
            mild = -np.log1p(np.exp(-normal))
            kinds = {
                "mild": mild,
                "slow": mild / 16,
                "zero": np.zeros(shape),
                "tiny": np.full(shape, -1e-6),
                "strong": -20 * random.random(shape),
                "extreme": np.full(shape, -1000.0),
            }
        match self.case.decay:
            case "mixed":
                return np.choose(random.integers(len(kinds), size=shape), list(kinds.values()))
            case "one_slow":
                g, last = kinds["strong"].copy(), max(shape[-1] - 1, 0)
                channel = random.integers(0, last + 1)
                g[..., channel] = kinds["slow"][..., channel]
                return g
            case "bursts":
                burst = random.random(shape[:2]) < 0.1
                far = random.choice((30.0, 1000.0)) * (1 if raw else -1)
                return np.where(burst.reshape(*shape[:2], *(1,) * (len(shape) - 2)), far, kinds["slow"])
            case kind:
                return kinds[kind]

    def _constants(self, HV: int) -> np.ndarray:
        random = self.random
        slopes = 10 ** random.uniform(-3, 0, HV)
        kinds = {
            "zero": np.zeros(HV),
            "tiny": np.full(HV, 1e-6),
            "strong": random.uniform(0, 20, HV),
            "extreme": np.full(HV, 1000.0),
            "mixed": np.choose(
                random.integers(4, size=HV), [slopes, np.zeros(HV), 20 * slopes, np.full(HV, 1000.0)]
            ),
        }
        return kinds.get(self.case.decay, slopes) * random.choice((-1.0, 1.0), HV)

    def _strengths(self, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        random, uniform = self.random, self.random.random(shape)
        if self.case.beta_is_logit:
            # Strengths below 2^-40 may be zero in a backward pass (docs/api.md).
            lowest = -27.0 if self.case.pass_name == "backward" else -30.0
            kinds = {
                "random": random.standard_normal(shape),
                "zero": np.full(shape, lowest),
                "one": np.full(shape, 30.0),
                "near_one": 6 + 2 * uniform,
            }
        else:
            kinds = {
                "random": uniform,
                "zero": np.zeros(shape),
                "one": np.ones(shape),
                "near_one": 1 - 1e-3 * uniform,
            }
        match kind:
            case "mixed":
                return np.choose(random.integers(len(kinds), size=shape), list(kinds.values()))
            case "steep":
                return np.where(uniform < 0.5, kinds["zero"], kinds["one"])
            case _:
                return kinds[kind]
