# SPDX-License-Identifier: Apache-2.0
"""The classes of calls that can be drawn or left out, each with its reason."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.case import Case

# Classes of calls that have a switch each (`--with`, `--without`), and whether they are drawn by default.
CLASSES = {
    # Beta near 2 where keys come back to the same few directions: keys that do not move, and in float32
    # chunks fewer channels than FEW. A reflection keeps every rounding, and a chunk of 64 tokens adds them
    # up.
    "reflections": False,
    # Chunks whose values are far smaller than the state that they overwrite, where channels are as few; and
    # float32 chunks whose keys do not move, where every write takes nearly all of the one before it away. One
    # channel that small values or tokens of zeros overwrite: what is left of a state is 1 - k^2, nothing but
    # roundings. So it is with write strengths of zero beside erase strengths. In a backward pass the gradient
    # of a final state that d_o brings little to.
    "small_values": False,
    # Gradients where a token writes several times along one direction, keys that do not move or one channel:
    # each write takes what those before it wrote, and what the decay left, away but for 1 - beta. What is
    # left after all of them is nothing but roundings.
    "repeated_writes": False,
    # float16 values below 6e-5, which have fewer bits the smaller they are.
    "fp16_subnormals": False,
    # Rows whose writes cancel in bfloat16: v follows the state that the keys meet.
    "cancelling": False,
    # float16 scores, scale times q . k, beyond the largest float16.
    "fp16_scores": False,
    # Results of so few numbers that the naive recurrence may be exact by luck.
    "few_numbers": False,
    # Rows that start from a slot that another row of the call writes.
    "forks": True,
    # float32 maps of a delta rule with two or three channels: up to 1.3 times the rule, where tokens forget
    # more.
    "few_channels": False,
    # Maps of one channel.
    "maps_k1": False,
    # Slots, counts, parents and plans in int64.
    "int64_indices": True,
    # A table of slots without columns, for rows without tokens.
    "empty_tables": True,
    # Malformed lengths near 2^31 where h is asked for.
    "far_lengths": True,
    # Nothing but prefills of KDA that sm90:fused takes.
    "one_kernel": False,
    # Decays and sizes beyond the limits in docs/design/fused-sm90.md: with one_kernel any; else write
    # strengths of 1e-13.
    "fused_limits": False,
}
DEFAULT = frozenset(name for name, drawn in CLASSES.items() if drawn)

# How many times the rule's budget a result may be wrong by in a class of numbers that is left out; infinity
# where only NaN and infinities are wrong, None where even they are not. docs/fuzzing.md has what was
# measured, and why.
BOUNDS: dict[str, float | None] = {
    "reflections": 200.0,
    "small_values": 8.0,
    "few_channels": 4.0,
    "maps_k1": 4.0,
    "cancelling": 6.0,
    "few_numbers": 4.0,
    "repeated_writes": math.inf,
    "fp16_subnormals": math.inf,
    "fp16_scores": None,
    "fused_limits": None,
}

STRONG = ("strong", "extreme", "bursts", "mixed")  # decays that leave nearly nothing of a state
FEWEST_NUMBERS = 64  # of a token

FEW = 32  # channels: a chunk has twice as many tokens
FEWEST = 16  # channels of a prefill in chunks


def inside(name: str, case: Case, classes: frozenset[str]) -> bool:
    """Whether a case is in a class of numbers."""
    match name:
        case "cancelling":
            return case.cancelling
        case "few_numbers":
            return case.value_heads * case.value_dim < FEWEST_NUMBERS
        case "fused_limits":
            return {"one_kernel", "fused_limits"} <= classes or moved(name, case)
        case _:
            return moved(name, case)


def moved(name: str, case: Case) -> bool:
    """Whether `without` moves a case out of a class."""
    return without(case, frozenset(CLASSES) - {name}) != case


def bound(case: Case, classes: frozenset[str] = DEFAULT) -> float | None:
    """What the budget is multiplied by; None where numbers are not judged."""
    bounds = [BOUNDS[name] for name in BOUNDS if inside(name, case, classes)]
    return None if None in bounds else max(bounds, default=1.0)


def keys_stand_still(case: Case) -> bool:
    return case.keys == "collinear" or dict(case.expanded).get("k") == 1


def _balanced(case: Case) -> Case:
    """A backward pass walks the other way: the gradient of the final state is its large state, and what d_o
    brings its values."""
    scale = case.key_dim**-0.5 if case.scale is None else abs(case.scale)
    brought = scale * (1.0 if case.qk_l2norm else case.query_size) / (100 if case.mixed_sizes else 1)
    if case.key_dim < FEW and case.d_final and not (case.d_o and brought >= 0.1):
        return case.but(d_final="", d_o=case.d_o or case.dtype)
    return case


def without(case: Case, classes: frozenset[str]) -> Case:
    """The case moved out of every class that is switched off."""
    if case.pass_name == "backward" and case.key_dim == 1 and case.qk_l2norm:
        # The norm of one number x takes all but 1e-6 / x^2 of its gradient away, also in float64.
        case = case.but(key_size=min(case.key_size, 10.0), query_size=min(case.query_size, 10.0))
        case = case.but(mixed_sizes=False)
    if "maps_k1" not in classes and case.pass_name == "segment" and case.key_dim == 1:
        case = case.but(key_dim=2)
    prefills = case.pass_name in ("prefill", "split")
    by_chunks = case.pass_name == "segment" or (
        (prefills or case.pass_name == "backward") and case.key_dim >= FEWEST
    )
    small = by_chunks and case.delta and case.key_dim < FEW and case.state != "none"
    if "small_values" not in classes and small:
        case = case.but(value_size=max(case.value_size, case.state_size))
    chunks = by_chunks and case.delta and case.dtype == "float32"
    if "few_channels" not in classes and chunks and case.key_dim in (2, 3):
        case = case.but(key_dim=4)
    few = chunks and case.key_dim < FEW
    still = keys_stand_still(case)
    if "reflections" not in classes and case.delta and (few or still or case.key_dim == 1):
        case = case.but(allow_neg_eigval=False)
    if "small_values" not in classes and case.delta and (few or (still and case.dtype == "float32")):
        case = case.but(value_size=max(case.value_size, case.state_size))
        if chunks and still:
            case = case.but(keys="random", expanded=tuple(each for each in case.expanded if each[0] != "k"))
        if case.key_dim < 4 and case.keys == "sparse":  # values of zero
            case = case.but(keys="random")
    repeated = case.pass_name == "backward" and case.householders > 1
    if "repeated_writes" not in classes and repeated and keys_stand_still(case):
        case = case.but(keys="random", expanded=tuple(each for each in case.expanded if each[0] != "k"))
    if "repeated_writes" not in classes and repeated:
        case = case.but(key_dim=max(case.key_dim, 2))
    weak = case.erases and case.beta in ("zero", "mixed", "steep")
    if "small_values" not in classes and weak and (few or still or case.key_dim == 1):
        case = case.but(beta="random")
    if "small_values" not in classes and case.delta and case.key_dim == 1:
        case = case.but(keys="random" if case.keys == "sparse" else case.keys)
        case = case.but(value_size=max(case.value_size, case.state_size), mixed_sizes=False)
    if "small_values" not in classes and case.pass_name == "backward" and by_chunks and case.delta:
        case = _balanced(case)
    if "fp16_subnormals" not in classes and case.dtype == "float16":
        case = case.but(value_size=max(case.value_size, 1e-1), query_size=max(case.query_size, 1e-1))
        case = case.but(key_size=max(case.key_size, 1e-1), mixed_sizes=False)
        case = case.but(outer_size=max(case.outer_size, 1e-1))
        case = case.but(scale=None if case.scale is None else case.scale and max(abs(case.scale), 0.1))
        if case.qk_l2norm:  # chunks put 1 / |k| to what they write
            case = case.but(key_size=min(case.key_size, 1.0))
        steep = case.A_log is not None and case.A_log[1] > 0
        # All that is left of a state where tokens write nothing new is subnormal.
        if case.decay in (*STRONG, "one_slow") or steep:
            case = case.but(keys="random" if case.keys == "sparse" else case.keys)
            if by_chunks:
                case = case.but(beta="random" if case.beta in ("zero", "mixed", "steep") else case.beta)
    if "fp16_subnormals" not in classes and case.state_dtype == "float16":
        case = case.but(state_size=max(case.state_size, 1e-1), value_size=max(case.value_size, 1e-1))
        case = case.but(mixed_sizes=False)
    if "fp16_scores" not in classes and case.dtype == "float16" and not case.qk_l2norm:
        case = case.but(key_size=min(case.key_size, 30.0), query_size=min(case.query_size, 30.0))
        if case.scale is not None:
            case = case.but(scale=max(-60.0, min(case.scale, 60.0)))
    fused = prefills and case.algorithm == "kda" and case.dtype == "bfloat16" and case.gate != "log_decay"
    if "fused_limits" not in classes and fused and case.beta == "zero" and case.beta_is_logit:
        case = case.but(beta="random")
    return case
