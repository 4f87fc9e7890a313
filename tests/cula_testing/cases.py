# SPDX-License-Identifier: Apache-2.0
"""The cases of `cula.bench.cases`, and their names: `HEADLINES` names the shapes that results are reported
for, `SECTIONS` those that show how time grows, and `FEW_HEADS` those that show what the gates do to it."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import torch

from cula.bench.cases import (
    ALGORITHMS,
    DECAYS,
    DELTA,
    ERASE,
    FAMILY,
    GATED,
    LOW_RANK,
    PRODUCT,
    TRAINING_PASSES,
    Case,
    Inputs,
    decode_case,
    make,
    prefill_case,
    state_like,
    strided,
)

__all__ = [
    "ALGORITHMS",
    "CPU_HEADLINES",
    "DECAYS",
    "DELTA",
    "ERASE",
    "FAMILY",
    "FEW_HEADS",
    "FEW_HEADS_OF_THE_MEAN",
    "GATED",
    "HEADLINES",
    "LOW_RANK",
    "MODELS",
    "PRODUCT",
    "RAGGED",
    "RAGGED_TOKENS",
    "SECTIONS",
    "TRAINING",
    "TRAINING_PASSES",
    "Case",
    "Inputs",
    "make",
    "ragged_lengths",
    "state_like",
    "strided",
]


MIX = (1300, 547, 2048, 963, 271, 3063)


def _by_shape(shapes: tuple[tuple[int, int, int], ...], decay: str, suffix: str = "") -> dict[str, Case]:
    """Of tokens of all sequences, heads, and sequences of equal length."""
    return {
        f"T{tokens}-H{heads}-N{count}{suffix}": prefill_case(
            "kda", (tokens // count,) * count, heads, decay=decay, packed=count > 1
        )
        for tokens, heads, count in shapes
    }


# Of the shapes that cuDNN publishes figures of. The gates are those of a trained layer, -2.5 a token in the
# mean, where those of the other cases make a state last; by a bias of each channel some channels last, too.
TRAINED_GATES = _by_shape(((2048, 12, 1), (4096, 8, 1), (8192, 16, 1), (8192, 12, 4)), "mild")


def _with_heads_of_64(cases: dict[str, Case]) -> dict[str, Case]:
    """Cases of 32 heads of 128 channels, and the same in 64 heads of 64, as RWKV-7's models have them."""
    narrow = {"heads": 64, "value_heads": 64, "key_dim": 64, "value_dim": 64}
    return cases | {name.replace("H32", "H64-K64"): case.but(**narrow) for name, case in cases.items()}


LOW_RANKS = _with_heads_of_64({"T8192-H32": prefill_case("rwkv7", (8192,), 32)})

# Of a training step, and of its backward pass alone.
TRAINING: dict[str, dict[str, Case]] = {
    "kda": {
        "T8192-H64": prefill_case("kda", (8192,), 64),
        "T8192-H96": prefill_case("kda", (8192,), 96),
        "T32768-H8": prefill_case("kda", (32768,), 8),
        **TRAINED_GATES,
    },
    "gdn": {"T8192-16-64": prefill_case("gdn", (8192,), 16, 64)},
    "gla": {"T8192-H32": prefill_case("gla", (8192,), 32)},
    "lightning": {"T8192-H64": prefill_case("lightning", (8192,), 64)},
    "delta": {"T8192-H32": prefill_case("delta", (8192,), 32)},
    "gdn2": {"T8192-H32": prefill_case("gdn2", (8192,), 32)},
    "gdp": {"T8192-H32": prefill_case("gdp", (8192,), 32)},  # two writes a token
    "rwkv7": LOW_RANKS,
}

ROWS = (1, 8, 32, 128, 256)
STATES = {"": torch.float32, "-bf16": torch.bfloat16}


def _decodes(op: str) -> dict[str, Case]:
    return {
        f"N{n}-H32{suffix}": decode_case(op, n).but(state_dtype=dtype)
        for suffix, dtype in STATES.items()
        for n in ROWS
    }


def _verifications(op: str) -> dict[str, Case]:
    """Of four draft tokens: with a state kept for each, and with those that they start from only read."""
    return {
        f"N{n}-S4-H32{suffix}{kept}": decode_case(op, n, tokens=4).but(
            state_dtype=dtype, reads_only=bool(kept)
        )
        for suffix, dtype in STATES.items()
        for kept in ("", "-read")
        for n in ROWS
    }


# (op, pass): case name -> Case. The names are those of the result files.
HEADLINES: dict[tuple[str, str], dict[str, Case]] = {
    ("kda", "prefill"): {
        "T8192-H96": prefill_case("kda", (8192,), 96),
        "mix-H96": prefill_case("kda", MIX, 96),
        "1024x8-H96": prefill_case("kda", (1024,) * 8, 96, packed=True),
        "T8192-H64": prefill_case("kda", (8192,), 64),
        "T8192-H64-softplus": prefill_case("kda", (8192,), 64).but(gate="softplus"),
        "T8192-H64-softplus-initial": prefill_case("kda", (8192,), 64, decay="initial").but(gate="softplus"),
        "B2-T8192-H64": prefill_case("kda", (8192,) * 2, 64),
        "T8192-H32": prefill_case("kda", (8192,), 32),
        "T32768-H32": prefill_case("kda", (32768,), 32),
        "T32768-H8": prefill_case("kda", (32768,), 8),
        "T131072-H8": prefill_case("kda", (131072,), 8),
        "T1024-H32": prefill_case("kda", (1024,), 32),
        "T131072-H32": prefill_case("kda", (131072,), 32),
        "T524288-H8": prefill_case("kda", (524288,), 8),
        **TRAINED_GATES,
    },
    ("gdn", "prefill"): {
        "T8192-16-64": prefill_case("gdn", (8192,), 16, 64),
        "T32768-16-32": prefill_case("gdn", (32768,), 16, 32),
        "T32768-2-8": prefill_case("gdn", (32768,), 2, 8),
        "T131072-16-32": prefill_case("gdn", (131072,), 16, 32),
    },
    ("lightning", "prefill"): {
        "T8192-H64": prefill_case("lightning", (8192,), 64),
        "T32768-H64": prefill_case("lightning", (32768,), 64),
    },
    ("gla", "prefill"): {"T8192-H32": prefill_case("gla", (8192,), 32)},
    ("gdn2", "prefill"): {"T8192-H32": prefill_case("gdn2", (8192,), 32)},
    ("gdp", "prefill"): {"T8192-H32": prefill_case("gdp", (8192,), 32)},
    ("rwkv7", "prefill"): LOW_RANKS,
    ("kda", "decode"): _decodes("kda"),
    ("gdn", "decode"): _decodes("gdn"),
    ("lightning", "decode"): _decodes("lightning"),
    ("gdn2", "decode"): _decodes("gdn2"),
    ("gdp", "decode"): _decodes("gdp"),
    ("rwkv7", "decode"): _with_heads_of_64(_decodes("rwkv7")),
    **{(op, "verify"): _verifications(op) for op in ("kda", "gdn")},
    **{(op, name): cases for op, cases in TRAINING.items() for name in TRAINING_PASSES},
}

# The headlines for machines without a GPU.
CPU_HEADLINES: dict[tuple[str, str], dict[str, Case]] = {
    **{
        (op, "prefill"): {f"T{t}-H16": prefill_case(op, (t,), 16) for t in (1024, 4096, 16384, 65536)}
        for op in ("kda", "gdn", "gla", "lightning")
    },
    **{
        (op, "decode"): {f"N{n}-H32": decode_case(op, n) for n in (1, 8)}
        for op in ("kda", "gdn", "lightning")
    },
    **{
        (op, "verify"): {
            "N1-S4-H32": decode_case(op, 1, tokens=4),
            "N8-S4-H32": decode_case(op, 8, tokens=4),
        }
        for op in ("kda", "gdn")
    },
    **{
        (op, name): {"T4096-H16": prefill_case(op, (4096,), 16)}
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
    return {f"T{t}-{suffix}": prefill_case(algorithm, (t,), heads, value_heads) for t in lengths}


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
                f"{model}-TP{ranks}-T{t}": prefill_case(algorithm, (t,), *shared).but(gate=gate)
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
            f"B{b}-T8192-H64": prefill_case("kda", (8192,) * b, 64) for b in (2, 4, 8)
        },
        ("kda", "32 heads"): _by_length("kda", (8192, 2048, 32768, 65536), 32),
        ("gdn", "16/64 heads"): _by_length("gdn", (8192, 2048, 32768), 16, 64),
        ("gla", "32 heads"): _by_length("gla", (8192, 2048, 32768), 32),
        ("lightning", "64 heads"): _by_length("lightning", (8192, 2048, 32768), 64),
    },
    "prefill_ragged": {
        ("kda", f"{kind}, 32 heads"): {
            f"{kind}-N{n}-H32": prefill_case("kda", ragged_lengths(kind, n, RAGGED_TOKENS), 32, packed=True)
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

# What serving asks for on one of several GPUs: tokens of all sequences, heads, sequences. One mean is taken
# over all of the first.
FEW_HEADS_OF_THE_MEAN = (
    *((2048, 12, 1), (2048, 16, 1), (4096, 8, 1), (4096, 12, 1), (8192, 12, 4)),
    *((8192, 16, 1), (1024, 4, 1), (3072, 10, 1), (8192, 24, 1), (16384, 16, 8)),
)
FEW_HEADS_BEYOND = ((8192, 32, 1), (32768, 32, 1), (32768, 8, 1), (131072, 8, 1))

# Panel of its plot: case name -> Case. How long a kernel takes may depend on what the gates forget.
FEW_HEADS: dict[str, dict[str, Case]] = {
    panel: _by_shape((*FEW_HEADS_OF_THE_MEAN, *FEW_HEADS_BEYOND), decay, suffix)
    for panel, decay, suffix in (
        ("gates of mean -2.5", "forgetting", ""),
        ("slow gates", "lasting", "-slow"),
        ("half of the heads slow", "half_lasting", "-mixed"),
    )
}
