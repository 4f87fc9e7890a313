# SPDX-License-Identifier: Apache-2.0
"""Problems as values: one generator for `python -m cula.bench`, the repository's benchmark and the tests.

A `Case` says what a call looks like, `make(case)` draws its tensors from the case's seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn import functional

from .. import algorithms

FAMILY = {row.name: (row.decay, row.update) for row in algorithms().values()}
ALGORITHMS = tuple(FAMILY)
GATED = tuple(name for name, (decay, _) in FAMILY.items() if decay in ("channel", "token"))
DELTA = tuple(row.name for row in algorithms().values() if row.takes_beta)
ERASE = tuple(row.name for row in algorithms().values() if row.takes_erase)
LOW_RANK = tuple(row.name for row in algorithms().values() if row.takes_low_rank)
PRODUCT = tuple(row.name for row in algorithms().values() if row.takes_several_writes)

TRAINING_PASSES = ("backward", "train")

# Log decay per token. "mixed" draws each value from all the others.
DECAYS = ("mild", "slow", "zero", "strong", "extreme", "mixed")
# Raw gates without a bias, and exp(A_log) from 1 to e, so that all channels of a head decay alike: by the
# sigmoid, and -2.5 a token in the mean, below 2^-64 in about 30 tokens. Of the heads named here they are
# lowered by 7, and outlast a segment of a sequence.
LEVEL = {"forgetting": slice(0, 0), "lasting": slice(None), "half_lasting": slice(1, None, 2)}


@dataclass(frozen=True)
class Case:
    algorithm: str = "kda"
    lengths: tuple[int, ...] = (64,)  # tokens of each sequence
    packed: bool = (
        False  # sequences one after the other along T with cu_seqlens; else a batch of equal lengths
    )
    tail: int = 0  # packed: tokens of T beyond the last sequence
    heads: int = 2
    value_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    householders: int = 2  # PRODUCT: the writes of a token
    dtype: torch.dtype = torch.bfloat16
    cu_dtype: torch.dtype = torch.int32

    gate: str = "log_decay"  # or "softplus", "bounded": g is raw
    decay: str = "mild"  # one of DECAYS; of raw gates also "initial" or of LEVEL
    lower_bound: float = -5.0  # bounded
    A_log: bool = True  # raw gates
    dt_bias: bool = True  # raw gates
    head_decay: bool = False  # per-token decay: one more constant per head is added
    gate_dtype: torch.dtype = torch.float32  # of g, beta, erase, a_key and b_key

    # "collinear": one direction for all tokens, and beta near 1; of LOW_RANK what a_key reads is taken away
    keys: str = "random"
    beta_is_logit: bool = False
    beta_per_value: bool = False
    allow_neg_eigval: bool = False  # with beta_is_logit
    qk_l2norm: bool = False
    scale: float | None = None  # None: K ** -0.5

    state: bool = True  # starts from a state
    pool: bool = False  # the states are slots of a larger pool with padded slots
    state_dtype: torch.dtype = torch.float32
    k_first: bool = False  # states lie in memory as [K, V]
    reads_only: bool = False  # a verification that keeps no states of its draft tokens

    fused: bool = False  # q, k, v are slices of one projection, all other tensors of tokens of wider rows
    backend: str = ""  # the target that has to run it; "" for the best
    seed: int = 0

    @property
    def tokens(self) -> int:
        """T of the tensors."""
        return sum(self.lengths) + self.tail if self.packed else self.lengths[0]

    @property
    def batch(self) -> int:
        """B of the tensors."""
        return 1 if self.packed else len(self.lengths)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def writes(self) -> int:
        """Of a token: the rows of k, v and beta for each row of q."""
        return self.householders if self.algorithm in PRODUCT else 1

    @property
    def options(self) -> dict[str, Any]:
        """What the call computes, in the words of the operators (`torch.ops.cula`)."""
        return {
            "algorithm": self.algorithm,
            "scale": self.key_dim**-0.5 if self.scale is None else self.scale,
            "gate": self.gate,
            "lower_bound": self.lower_bound if self.gate == "bounded" else 0.0,
            "qk_l2norm": self.qk_l2norm,
            "beta_is_logit": self.beta_is_logit,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


# A tensor, or None: which a call has, its algorithm and its case say.
Maybe = Any
SomeInputs = TypeVar("SomeInputs", bound="Inputs")


@dataclass
class Inputs:
    """The tensors of one call. States are views [.., HV, V, K] whatever their layout in memory."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: Maybe = None
    decay: Maybe = None
    beta: Maybe = None
    erase: Maybe = None
    a_key: Maybe = None
    b_key: Maybe = None
    A_log: Maybe = None
    dt_bias: Maybe = None
    cu_seqlens: Maybe = None
    initial_state: Maybe = None
    initial_state_indices: Maybe = None
    has_initial_state: Maybe = None

    TENSORS: ClassVar[tuple[str, ...]] = (
        *("q", "k", "v", "g", "decay", "beta", "erase", "a_key", "b_key", "A_log", "dt_bias", "cu_seqlens"),
    )
    # Those with a row for each token, and those with one for each write of a token.
    TOKENS: ClassVar[tuple[str, ...]] = ("q", "g", "a_key", "b_key")
    WRITES: ClassVar[tuple[str, ...]] = ("k", "v", "beta", "erase")
    STATES: ClassVar[tuple[str, ...]] = ("initial_state", "initial_state_indices", "has_initial_state")

    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {name: getattr(self, name) for name in self.TENSORS}

    def states(self) -> dict[str, torch.Tensor | None]:
        return {name: getattr(self, name) for name in self.STATES}

    @property
    def o_shape(self) -> tuple[int, ...]:
        """[B, T, HV, V]."""
        return (*self.q.shape[:2], *self.v.shape[2:])

    def span(self, name: str, begin: int, end: int) -> slice:
        """The rows that a tensor has for the tokens from `begin` to `end`."""
        n = self.case.writes if name in self.WRITES else 1
        return slice(begin * n, end * n)

    def rows(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The tensors of the tokens from `begin` to `end`, by name."""
        return {
            name: x[:, self.span(name, begin, end)]
            for name in (*self.TOKENS, *self.WRITES)
            if (x := getattr(self, name)) is not None
        }

    def but(self: SomeInputs, **changes: Any) -> SomeInputs:
        return dataclasses.replace(self, **changes)

    def map(self: SomeInputs, function: Callable[[torch.Tensor], torch.Tensor]) -> SomeInputs:
        """The same call on function(tensor)."""
        everything = {**self.tensors(), **self.states()}
        return self.but(
            **{name: function(tensor) for name, tensor in everything.items() if tensor is not None}
        )

    def double(self) -> Inputs:
        """Exact float64 copies, for the oracle."""
        return self.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)

    def first_heads(self, count: int) -> Inputs:
        """The same sequences (states not in a pool), and of their heads the first ones."""
        assert self.case.heads == self.case.value_heads
        dims = {
            "q": 2,
            "k": 2,
            "v": 2,
            "g": 2,
            "beta": 2,
            "erase": 2,
            "a_key": 2,
            "b_key": 2,
            "decay": 0,
            "A_log": 0,
            "dt_bias": 0,
            "initial_state": 1,
        }
        cut = {
            name: x.narrow(dim, 0, count)
            for name, dim in dims.items()
            if (x := getattr(self, name)) is not None
        }
        return self.but(case=self.case.but(heads=count, value_heads=count), **cut)

    def tokens(self, begin: int, end: int) -> Inputs:
        """The same sequences (batch form) cut to some of their tokens."""
        assert self.cu_seqlens is None
        return self.but(**self.rows(begin, end))


def strided(tensor: torch.Tensor, pad: int = 24) -> torch.Tensor:
    """The same values as a slice of wider rows: the last dimension contiguous, no other stride minimal."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + pad), float("nan")).to(tensor)
    view = wide[..., pad // 3 : pad // 3 + tensor.shape[-1]]
    return view.copy_(tensor)


def state_like(
    case: Case,
    count: int,
    *,
    pad: int = 0,
    fill: torch.Tensor | float = float("nan"),
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """States [count, HV, V, K] in the case's dtype and layout, with `pad` elements of NaN between slots."""
    inner = (case.key_dim, case.value_dim) if case.k_first else (case.value_dim, case.key_dim)
    slot = case.value_heads * inner[0] * inner[1] + pad
    storage = torch.full((count, slot), float("nan"), dtype=case.state_dtype, device=device)
    view = storage[:, : slot - pad].view(count, case.value_heads, *inner)
    view = view.transpose(-1, -2) if case.k_first else view
    return view.copy_(torch.as_tensor(fill))


def _log_decay(kind: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    def mild() -> torch.Tensor:
        return functional.logsigmoid(torch.randn(shape, generator=draw))

    kinds = {
        "mild": mild,
        "slow": lambda: mild() / 16,
        "zero": lambda: torch.zeros(shape),
        "strong": lambda: -20 * torch.rand(shape, generator=draw),
        "extreme": lambda: torch.full(shape, -1000.0),
    }
    if kind != "mixed":
        return kinds[kind]()
    choice = torch.randint(len(kinds), shape, generator=draw)
    stacked = torch.stack([make_one() for make_one in kinds.values()])
    return stacked.gather(0, choice[None])[0]


def _raw_gate(kind: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Raw gates [B, T, HV, ...] that softplus or the sigmoid turns into about the named decay."""
    normal = torch.randn(shape, generator=draw)
    kinds = {
        "mild": normal,
        "slow": normal - 4,
        "zero": torch.full(shape, -1000.0),
        "strong": 20 * torch.rand(shape, generator=draw),
        "extreme": torch.full(shape, 1000.0),
    }
    if kind == "initial":
        return 0.2 * normal
    if kind in LEVEL:
        normal[:, :, LEVEL[kind]] -= 7
        return normal
    if kind != "mixed":
        return kinds[kind]
    choice = torch.randint(len(kinds), shape, generator=draw)
    return torch.stack(list(kinds.values())).gather(0, choice[None])[0]


def _dt_bias(kind: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """ "initial" is what a layer of FLA's starts with, as Mamba's do: its softplus is 0.001 to 0.1, evenly in
    the logarithm. Raw gates then come from two projections with weights of 0.02, and have a deviation of
    0.2."""
    if kind in LEVEL:
        return torch.zeros(shape)
    if kind != "initial":
        return torch.randn(shape, generator=draw)
    dt = 0.001 * 100 ** torch.rand(shape, generator=draw)
    return dt + torch.log(-torch.expm1(-dt))


def _low_rank_keys(k: torch.Tensor, case: Case, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """As RWKV-7 makes them: what lies along a direction of the token is removed, each channel by a share of
    its own, which is the shape `[B, T, HV, K]` of both."""
    shape = (case.batch, case.tokens, case.value_heads, case.key_dim)
    along = torch.randn(shape, generator=draw)
    if case.keys == "collinear":
        along = k.float().to(along.device).repeat_interleave(shape[2] // k.shape[2], dim=2)
    along = functional.normalize(along, dim=-1)
    share = torch.randn(shape, generator=draw).sigmoid() if case.keys == "random" else torch.ones(shape)
    return -along, along * share


def make(case: Case, device: torch.device | str | None = None, draw_on: torch.device | str = "cpu") -> Inputs:
    """The case's tensors. The same case gives the same values, whatever the layout flags and the device.

    draw_on: where the random numbers are made; the benchmark's many come faster, and different, from a GPU.
    """
    assert case.packed or len(set(case.lengths)) == 1, "a batch has sequences of one length"
    device = torch.get_default_device() if device is None else torch.device(device)
    with torch.device(draw_on):
        return _draw(case, device, torch.Generator(draw_on).manual_seed(case.seed))


def _draw(case: Case, device: torch.device, draw: torch.Generator) -> Inputs:
    decay, _ = FAMILY[case.algorithm]
    B, T, H, HV, K, V = case.batch, case.tokens, case.heads, case.value_heads, case.key_dim, case.value_dim
    rows = T * case.writes

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    def place(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype)

    q, v = normal(B, T, H, K), normal(B, rows, HV, V)
    k = normal(B, rows, H, K)
    if case.keys == "collinear":
        k = k[:, :1].expand_as(k).clone() if T else k
        q = k[:, :T].clone()
    if not case.qk_l2norm:
        # The delta rule contracts only for |k| <= 1; the additive rule is drawn alike so that float16 holds
        # the states.
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    q, k, v = (place(tensor, case.dtype) for tensor in (q, k, v))

    inputs = Inputs(case, q, k, v)
    gate_shape = {"channel": (B, T, HV, K), "token": (B, T, HV)}.get(decay)
    if gate_shape:
        form = _log_decay if case.gate == "log_decay" else _raw_gate
        inputs.g = place(form(case.decay, gate_shape, draw), case.gate_dtype)
        if case.gate != "log_decay":
            if case.A_log:
                share = torch.rand(HV, generator=draw)
                A_log = share if case.decay in LEVEL else torch.log(1 + 15 * share)
                inputs.A_log = place(A_log, torch.float32)
            if case.dt_bias:
                bias_shape = (HV, K) if decay == "channel" else (HV,)
                inputs.dt_bias = place(_dt_bias(case.decay, bias_shape, draw), torch.float32)
    if decay == "head" or (decay == "token" and case.head_decay):
        slopes = torch.zeros(HV) if case.decay == "zero" else -torch.logspace(-3, 0, HV)
        inputs.decay = place(torch.full((HV,), -1000.0) if case.decay == "extreme" else slopes, torch.float32)

    def strengths(*shape: int) -> torch.Tensor:
        logits = torch.full(shape, 8.0) if case.keys == "collinear" else normal(*shape)
        return place(logits if case.beta_is_logit else logits.sigmoid(), case.gate_dtype)

    if case.algorithm in DELTA:
        inputs.beta = strengths(B, rows, HV, V) if case.beta_per_value else strengths(B, rows, HV)
    if case.algorithm in ERASE:
        inputs.erase = strengths(B, rows, HV, K)
    if case.algorithm in LOW_RANK:
        inputs.a_key, inputs.b_key = (place(x, case.gate_dtype) for x in _low_rank_keys(k, case, draw))
    if case.packed:
        bounds = torch.tensor((0, *case.lengths), dtype=torch.int64).cumsum(0)
        inputs.cu_seqlens = place(bounds, case.cu_dtype)

    if case.fused:
        n = case.writes
        given = ((inputs.q, 1), (inputs.k, n), (inputs.v, n))
        by_token = [x.unflatten(1, (T, count)).flatten(2) for x, count in given]
        q, k, v = strided(torch.cat(by_token, dim=-1)).split((H * K, n * H * K, n * HV * V), dim=-1)
        inputs.q = q.unflatten(-1, (H, K))
        inputs.k = k.unflatten(-1, (n, H, K)).flatten(1, 2)
        inputs.v = v.unflatten(-1, (n, HV, V)).flatten(1, 2)
        for name in ("g", "beta", "erase", "a_key", "b_key"):
            if (x := getattr(inputs, name)) is not None:
                setattr(inputs, name, strided(x))

    if case.state:
        N = case.sequences
        values = place(normal(N, HV, V, K) / 4, case.state_dtype)
        if case.pool:
            slots = 2 * N + 1
            order = torch.randperm(slots, generator=draw)[:N].to(torch.int32)
            inputs.initial_state_indices = order.to(device)
            inputs.initial_state = state_like(case, slots, pad=192, device=device)
            inputs.initial_state[order.long()] = values
        else:
            inputs.initial_state = state_like(case, N, fill=values, device=device)
    return inputs


def prefill_case(
    algorithm: str, lengths: tuple[int, ...], heads: int, value_heads: int | None = None, **more: Any
) -> Case:
    """A prefill as models pose it: raw gate and beta logits in kernel where the family has them, no initial
    state."""
    delta = algorithm in DELTA
    more.setdefault("packed", len(set(lengths)) > 1)
    more.setdefault("decay", "slow")
    return Case(
        algorithm=algorithm,
        lengths=lengths,
        heads=heads,
        value_heads=value_heads or heads,
        key_dim=128,
        value_dim=128,
        gate={
            "kda": "bounded",
            "gdn": "softplus",
            "gdn2": "bounded",
            "gdp": "softplus",
            "rwkv7": "bounded",
        }.get(algorithm, "log_decay"),
        gate_dtype=torch.bfloat16 if delta or algorithm in LOW_RANK else torch.float32,
        beta_is_logit=delta,
        beta_per_value=algorithm in ERASE,
        qk_l2norm=delta,
        state=False,
        **more,
    )


def decode_case(algorithm: str, rows: int, heads: int = 32, tokens: int = 1) -> Case:
    """Of several tokens: a verification."""
    return prefill_case(algorithm, (tokens,) * rows, heads).but(state=True, pool=True)
