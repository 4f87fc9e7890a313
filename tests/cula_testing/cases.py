# SPDX-License-Identifier: Apache-2.0
"""Problems as values: one generator shared by the tests and the benchmarks.

A `Case` says what a call looks like, `make(case)` draws its tensors from the case's seed, `HEADLINES` names
the shapes that results are reported for, and `SECTIONS` those that show how time grows.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.nn import functional

import cula

# algorithm: (decay, update)
FAMILY = {row.name: (row.decay, row.update) for row in cula.algorithms().values()}
ALGORITHMS = tuple(FAMILY)
GATED = tuple(name for name, (decay, _) in FAMILY.items() if decay in ("channel", "token"))
DELTA = tuple(row.name for row in cula.algorithms().values() if row.takes_beta)

# Log decay per token. "mixed" draws each value from all the others.
DECAYS = ("mild", "slow", "zero", "strong", "extreme", "mixed")


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
    dtype: torch.dtype = torch.bfloat16
    cu_dtype: torch.dtype = torch.int32

    gate: str = "log_decay"  # or "softplus", "bounded": g is raw
    decay: str = "mild"  # one of DECAYS; or of raw softplus gates "initial"
    lower_bound: float = -5.0  # bounded
    A_log: bool = True  # raw gates
    dt_bias: bool = True  # raw gates
    head_decay: bool = False  # per-token decay: one more constant per head is added
    gate_dtype: torch.dtype = torch.float32  # of g and beta

    keys: str = "random"  # or "collinear": one direction for all tokens, and beta near 1
    beta_is_logit: bool = False
    beta_per_value: bool = False
    allow_neg_eigval: bool = False  # with beta_is_logit
    qk_l2norm: bool = False
    scale: float | None = None  # None: K ** -0.5

    state: bool = True  # starts from a state
    pool: bool = False  # the states are slots of a larger pool with padded slots
    state_dtype: torch.dtype = torch.float32
    k_first: bool = False  # states lie in memory as [K, V]

    fused: bool = False  # q, k, v are slices of one projection, g and beta of wider rows
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
    def options(self) -> dict:
        """Keyword arguments of `cula_testing.operators.call` for every pass."""
        return {
            "algorithm": self.algorithm,
            "scale": self.key_dim**-0.5 if self.scale is None else self.scale,
            "gate": self.gate,
            "lower_bound": self.lower_bound if self.gate == "bounded" else 0.0,
            "qk_l2norm": self.qk_l2norm,
            "beta_is_logit": self.beta_is_logit,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def but(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)


@dataclass
class Inputs:
    """The tensors of one call. States are views [.., HV, V, K] whatever their layout in memory."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    initial_state_indices: torch.Tensor | None = None
    has_initial_state: torch.Tensor | None = None

    TENSORS = ("q", "k", "v", "g", "decay", "beta", "A_log", "dt_bias", "cu_seqlens")
    STATES = ("initial_state", "initial_state_indices", "has_initial_state")

    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {name: getattr(self, name) for name in self.TENSORS}

    def states(self) -> dict[str, torch.Tensor | None]:
        return {name: getattr(self, name) for name in self.STATES}

    def but(self, **changes) -> Inputs:
        return dataclasses.replace(self, **changes)

    def map(self, function) -> Inputs:
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
        cut = ("q", "k", "v", "g", "beta")
        named = {name: getattr(self, name) for name in cut}
        return self.but(
            **{name: tensor[:, begin:end] for name, tensor in named.items() if tensor is not None}
        )


def strided(tensor: torch.Tensor, pad: int = 24) -> torch.Tensor:
    """The same values as a slice of wider rows: the last dimension contiguous, no other stride minimal."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + pad), float("nan")).to(tensor)
    view = wide[..., pad // 3 : pad // 3 + tensor.shape[-1]]
    return view.copy_(tensor)


def state_like(
    case: Case, count: int, *, pad: int = 0, fill: torch.Tensor | float = float("nan"), device=None
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
    """Raw gates that softplus or the sigmoid turns into about the named decay."""
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
    if kind != "mixed":
        return kinds[kind]
    choice = torch.randint(len(kinds), shape, generator=draw)
    return torch.stack(list(kinds.values())).gather(0, choice[None])[0]


def _dt_bias(kind: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """ "initial" is what a layer of FLA's starts with, as Mamba's do: its softplus is 0.001 to 0.1, evenly in
    the logarithm. Raw gates then come from two projections with weights of 0.02, and have a deviation of
    0.2."""
    if kind != "initial":
        return torch.randn(shape, generator=draw)
    dt = 0.001 * 100 ** torch.rand(shape, generator=draw)
    return dt + torch.log(-torch.expm1(-dt))


def make(case: Case, device: torch.device | str | None = None, draw_on: torch.device | str = "cpu") -> Inputs:
    """The case's tensors. The same case gives the same values, whatever the layout flags and the device.

    draw_on: where the random numbers are made; the benchmark's many come faster, and different, from a GPU.
    """
    assert case.packed or len(set(case.lengths)) == 1, "a batch has sequences of one length"
    device = torch.get_default_device() if device is None else torch.device(device)
    with torch.device(draw_on):
        return _draw(case, device, torch.Generator(draw_on).manual_seed(case.seed))


def _draw(case: Case, device: torch.device, draw: torch.Generator) -> Inputs:
    decay, update = FAMILY[case.algorithm]
    B, T, H, HV, K, V = case.batch, case.tokens, case.heads, case.value_heads, case.key_dim, case.value_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    def place(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype)

    q, v = normal(B, T, H, K), normal(B, T, HV, V)
    k = normal(B, T, H, K)
    if case.keys == "collinear":
        k = k[:, :1].expand_as(k).clone() if T else k
        q = k.clone()
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
                inputs.A_log = place(torch.log(1 + 15 * torch.rand(HV, generator=draw)), torch.float32)
            if case.dt_bias:
                shape = (HV, K) if decay == "channel" else (HV,)
                inputs.dt_bias = place(_dt_bias(case.decay, shape, draw), torch.float32)
    if decay == "head" or (decay == "token" and case.head_decay):
        slopes = torch.zeros(HV) if case.decay == "zero" else -torch.logspace(-3, 0, HV)
        inputs.decay = place(torch.full((HV,), -1000.0) if case.decay == "extreme" else slopes, torch.float32)
    if update == "delta":
        shape = (B, T, HV, V) if case.beta_per_value else (B, T, HV)
        logits = torch.full(shape, 8.0) if case.keys == "collinear" else normal(*shape)
        inputs.beta = place(logits if case.beta_is_logit else logits.sigmoid(), case.gate_dtype)
    if case.packed:
        bounds = torch.tensor((0, *case.lengths), dtype=torch.int64).cumsum(0)
        inputs.cu_seqlens = place(bounds, case.cu_dtype)

    if case.fused:
        projection = torch.cat([inputs.q.flatten(2), inputs.k.flatten(2), inputs.v.flatten(2)], dim=-1)
        q, k, v = strided(projection).split((H * K, H * K, HV * V), dim=-1)
        inputs.q, inputs.k, inputs.v = (
            q.unflatten(-1, (H, K)),
            k.unflatten(-1, (H, K)),
            v.unflatten(-1, (HV, V)),
        )
        inputs.g = None if inputs.g is None else strided(inputs.g)
        inputs.beta = None if inputs.beta is None else strided(inputs.beta)

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


def _prefill(
    algorithm: str, lengths: tuple[int, ...], heads: int, value_heads: int | None = None, **more
) -> Case:
    """A prefill as models pose it: raw gate and beta logits in kernel where the family has them, no initial
    state."""
    _, update = FAMILY[algorithm]
    more.setdefault("packed", len(set(lengths)) > 1)
    more.setdefault("decay", "slow")
    return Case(
        algorithm=algorithm,
        lengths=lengths,
        heads=heads,
        value_heads=value_heads or heads,
        key_dim=128,
        value_dim=128,
        gate={"kda": "bounded", "gdn": "softplus"}.get(algorithm, "log_decay"),
        gate_dtype=torch.bfloat16 if update == "delta" else torch.float32,
        beta_is_logit=update == "delta",
        qk_l2norm=update == "delta",
        state=False,
        **more,
    )


def _decode(algorithm: str, rows: int, heads: int = 32) -> Case:
    return _prefill(algorithm, (1,) * rows, heads).but(state=True, pool=True)


MIX = (1300, 547, 2048, 963, 271, 3063)

# Shapes that cuDNN publishes figures of: tokens of all sequences, heads, sequences. The gates are those of a
# trained layer, -2.5 a token in the mean, where those of the other cases make a state last.
TRAINED_GATES = {
    f"T{tokens}-H{heads}-N{count}": _prefill(
        "kda", (tokens // count,) * count, heads, decay="mild", packed=count > 1
    )
    for tokens, heads, count in ((2048, 12, 1), (4096, 8, 1), (8192, 16, 1), (8192, 12, 4))
}

# Of a training step, and of its backward pass alone.
TRAINING: dict[str, dict[str, Case]] = {
    "kda": {
        "T8192-H64": _prefill("kda", (8192,), 64),
        "T8192-H96": _prefill("kda", (8192,), 96),
        "T32768-H8": _prefill("kda", (32768,), 8),
        **TRAINED_GATES,
    },
    "gdn": {"T8192-16-64": _prefill("gdn", (8192,), 16, 64)},
    "gla": {"T8192-H32": _prefill("gla", (8192,), 32)},
    "lightning": {"T8192-H64": _prefill("lightning", (8192,), 64)},
    "delta": {"T8192-H32": _prefill("delta", (8192,), 32)},
}
TRAINING_PASSES = ("backward", "train")

# (op, pass): case name -> Case. The names are those of the result files.
HEADLINES: dict[tuple[str, str], dict[str, Case]] = {
    ("kda", "prefill"): {
        "T8192-H96": _prefill("kda", (8192,), 96),
        "mix-H96": _prefill("kda", MIX, 96),
        "1024x8-H96": _prefill("kda", (1024,) * 8, 96, packed=True),
        "T8192-H64": _prefill("kda", (8192,), 64),
        "T8192-H64-softplus": _prefill("kda", (8192,), 64).but(gate="softplus"),
        "T8192-H64-softplus-initial": _prefill("kda", (8192,), 64, decay="initial").but(gate="softplus"),
        "B2-T8192-H64": _prefill("kda", (8192,) * 2, 64),
        "T8192-H32": _prefill("kda", (8192,), 32),
        "T32768-H32": _prefill("kda", (32768,), 32),
        "T32768-H8": _prefill("kda", (32768,), 8),
        "T131072-H8": _prefill("kda", (131072,), 8),
        "T1024-H32": _prefill("kda", (1024,), 32),
        "T131072-H32": _prefill("kda", (131072,), 32),
        "T524288-H8": _prefill("kda", (524288,), 8),
        **TRAINED_GATES,
    },
    ("gdn", "prefill"): {
        "T8192-16-64": _prefill("gdn", (8192,), 16, 64),
        "T32768-16-32": _prefill("gdn", (32768,), 16, 32),
        "T32768-2-8": _prefill("gdn", (32768,), 2, 8),
        "T131072-16-32": _prefill("gdn", (131072,), 16, 32),
    },
    ("lightning", "prefill"): {
        "T8192-H64": _prefill("lightning", (8192,), 64),
        "T32768-H64": _prefill("lightning", (32768,), 64),
    },
    ("gla", "prefill"): {"T8192-H32": _prefill("gla", (8192,), 32)},
    ("kda", "decode"): {f"N{n}-H32": _decode("kda", n) for n in (1, 8, 32, 128, 256)},
    ("gdn", "decode"): {f"N{n}-H32": _decode("gdn", n) for n in (1, 8, 32, 128, 256)},
    ("lightning", "decode"): {f"N{n}-H32": _decode("lightning", n) for n in (1, 8, 32, 128, 256)},
    **{(op, "verify"): {"N32-S4-H32": _decode(op, 32).but(lengths=(4,) * 32)} for op in ("kda", "gdn")},
    **{(op, name): cases for op, cases in TRAINING.items() for name in TRAINING_PASSES},
}

# The headlines for machines without a GPU.
CPU_HEADLINES: dict[tuple[str, str], dict[str, Case]] = {
    **{
        (op, "prefill"): {f"T{t}-H16": _prefill(op, (t,), 16) for t in (1024, 4096, 16384, 65536)}
        for op in ("kda", "gdn", "gla", "lightning")
    },
    **{(op, "decode"): {f"N{n}-H32": _decode(op, n) for n in (1, 8)} for op in ("kda", "gdn", "lightning")},
    **{
        (op, "verify"): {
            "N1-S4-H32": _decode(op, 1).but(lengths=(4,)),
            "N8-S4-H32": _decode(op, 8).but(lengths=(4,) * 8),
        }
        for op in ("kda", "gdn")
    },
    **{
        (op, name): {"T4096-H16": _prefill(op, (4096,), 16)}
        for op in ("kda", "gdn")
        for name in TRAINING_PASSES
    },
}


def ragged_lengths(kind: str, count: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of at least one token each that add up to `tokens`; the same on every machine.

    uniform: as equal as they can be. random: cut at places that are all equally likely. skewed: in proportion
    to 1, 1/2, 1/3, ... in random order, a few long ones and many short ones.
    """
    draw = random.Random(seed)
    if kind == "uniform":
        cuts = [tokens * i // count for i in range(count + 1)]
    elif kind == "random":
        cuts = [0, *sorted(draw.sample(range(1, tokens), count - 1)), tokens]
    elif kind == "skewed":
        weights = [1 / rank for rank in range(1, count + 1)]
        draw.shuffle(weights)
        sums = [0.0, *accumulate(weights)]
        cuts = [i + int((tokens - count) * (part / sums[-1])) for i, part in enumerate(sums)]
    else:
        raise ValueError(f"kind must be uniform, random or skewed, got {kind!r}")
    return tuple(end - begin for begin, end in pairwise(cuts))


def _heads(heads: int, value_heads: int) -> str:
    return f"{heads} heads" if heads == value_heads else f"{heads}/{value_heads} heads"


def _by_length(
    algorithm: str, lengths: tuple[int, ...], heads: int, value_heads: int | None = None
) -> dict[str, Case]:
    suffix = f"{heads}-{value_heads}" if value_heads else f"H{heads}"
    return {f"T{t}-{suffix}": _prefill(algorithm, (t,), heads, value_heads) for t in lengths}


RAGGED = ("uniform", "random", "skewed")
RAGGED_TOKENS = 32768

# Model: algorithm, heads of q and k, heads of v, gate; heads are of 128. docs/benchmarks.md names the source.
MODELS = {
    "Kimi-K3": ("kda", 96, 96, "bounded"),
    "Kimi-Linear-48B": ("kda", 32, 32, "softplus"),
    "Qwen3.5-397B": ("gdn", 16, 64, "softplus"),
    "Qwen3-Next-80B": ("gdn", 16, 32, "softplus"),
    "MiniMax-01": ("lightning", 64, 64, "log_decay"),
}
TENSOR_PARALLEL = (1, 2, 4, 8)
MODEL_TOKENS = (8192, 1024, 16384)


def _model_panels() -> dict[tuple[str, str], dict[str, Case]]:
    """One rank's share of each model's heads."""
    panels = {}
    for model, (algorithm, heads, value_heads, gate) in MODELS.items():
        for ranks in TENSOR_PARALLEL:
            shared = (heads // ranks, value_heads // ranks)
            panels[algorithm, f"{model} TP{ranks}, {_heads(*shared)}"] = {
                f"{model}-TP{ranks}-T{t}": _prefill(algorithm, (t,), *shared).but(gate=gate)
                for t in MODEL_TOKENS
            }
    return panels


# Section: (op, panel of its plot): case name -> Case. What tunes itself at the first call of a head count, as
# FLA does, should not do it on a short one, so panels of short lengths do not begin with them.
SECTIONS: dict[str, dict[tuple[str, str], dict[str, Case]]] = {
    "prefill_fixed": {
        ("kda", "96 heads"): _by_length("kda", (8192, 1024, 16384), 96),
        ("kda", "64 heads"): _by_length("kda", (8192, 1024, 32768), 64),
        ("kda", "64 heads, batches of 8K"): {
            f"B{b}-T8192-H64": _prefill("kda", (8192,) * b, 64) for b in (2, 4, 8)
        },
        ("kda", "32 heads"): _by_length("kda", (8192, 2048, 32768, 65536), 32),
        ("gdn", "16/64 heads"): _by_length("gdn", (8192, 2048, 32768), 16, 64),
        ("gla", "32 heads"): _by_length("gla", (8192, 2048, 32768), 32),
        ("lightning", "64 heads"): _by_length("lightning", (8192, 2048, 32768), 64),
    },
    "prefill_ragged": {
        ("kda", f"{kind}, 32 heads"): {
            f"{kind}-N{n}-H32": _prefill("kda", ragged_lengths(kind, n, RAGGED_TOKENS), 32, packed=True)
            for n in (8, 32, 128, 256)
        }
        for kind in RAGGED
    },
    "prefill_short": {
        ("kda", "32 heads"): _by_length("kda", (1024, 512, 256, 128, 64, 32, 16), 32),
        ("kda", "96 heads"): _by_length("kda", (1024, 256, 64, 16), 96),
        ("gdn", "16/64 heads"): _by_length("gdn", (1024, 256, 64, 16), 16, 64),
    },
    "prefill_models": _model_panels(),
    # The longest call is the last of all: it asks most of every implementation's indices.
    "prefill_low_parallelism": {
        ("gdn", "2/8 heads"): _by_length("gdn", (32768, 8192, 131072), 2, 8),
        ("kda", "16 heads"): _by_length("kda", (32768, 8192, 131072), 16),
        ("kda", "8 heads"): _by_length("kda", (32768, 8192, 131072, 524288), 8),
        ("kda", "4 heads"): _by_length("kda", (32768, 8192, 131072, 1048576), 4),
    },
}
