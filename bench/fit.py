# SPDX-License-Identifier: Apache-2.0
"""python -m bench.fit: what the kernels of a chunked prefill cost on the GPU at hand.

Every way to run a prefill is forced and measured over a few shapes. The costs of src/cuda/machines.h are then
fitted to the times: those that make the library's own predictions (cula.explain) as right as they can be. The
command prints the costs of each family and carry, for machines.cc, and for each shape what was measured, what
is predicted, and how much longer the way that is predicted to be the fastest takes than the one that is; it
writes all of it to bench/results/<device>/machine.json. What a row of the table holds besides is in
docs/design/planning.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench import machine
from bench.results import RESULTS
from cula import _ops
from cula.bench import gpu
from cula.bench.impls import PREFILL, keywords
from cula.bench.measure import Call
from cula_testing.cases import Case, Inputs, make

# Families in the order of machines.h: the algorithm, its gate, and how its decays are drawn, as in the
# benchmark's headlines. Softplus gates of KDA are those of a new model.
FAMILIES = (("kda", "bounded", "slow"), ("kda", "softplus", "initial"), ("gdn", "softplus", "slow"),
            ("gla", "log_decay", "slow"), ("lightning", "log_decay", "slow"))  # fmt: skip
PAIRED_ONLY = (1,)  # families whose fused kernel has no form for single CTAs
TARGETS = ("sm90", "sm80")
COSTS = ("prepare", "carry", "carry", "map", "segment", "segment", "halves", "fused", "fused")
# Value heads, tokens of one sequence, and value channels. Sixty-four channels are one CTA of four warps.
SHAPES = ((4, 8192, 128), (8, 2048, 128), (8, 32768, 128), (16, 1024, 128), (16, 8192, 128),
          (24, 16384, 128), (32, 4096, 128), (32, 16384, 128), (48, 8192, 128), (64, 1024, 128),
          (64, 8192, 128), (96, 8192, 128), (128, 4096, 128), (8, 2048, 64), (8, 32768, 64),
          (16, 8192, 64), (32, 16384, 64), (64, 8192, 64))  # fmt: skip
# With fewer heads and 128 channels a segment may have CTAs of four warps or of eight, which the costs decide.
# Such times are shown, and not fitted.
SURE_HEADS = 24
REPEATS = 9
START = (3.0, 1.2, 2.0, 1.0, 1.3, 2.2, 0.9, 2.5, 4.0)  # of COSTS
# The costs of CTAs of eight warps by those of four: of whole sequences, and of segments (decays per channel,
# per token). They are held: whole sequences have eight warps only where memory bounds them.
WIDE, WIDE_SEGMENTS = 1.48, (1.95, 1.54)
NO_OPERANDS = (("sm90", 4),)  # targets and families without a prepare
ROUNDS = 40  # of the fit, each over all costs


@dataclass
class Point:
    """One way to run one shape."""

    family: int
    target: str
    strategy: str
    heads: int
    tokens: int
    value_dim: int
    measured: float  # microseconds
    predicted: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.tokens, self.value_dim

    @property
    def fitted(self) -> bool:
        return self.strategy != "segments" or self.value_dim == 64 or self.heads >= SURE_HEADS


def ways(
    family: int, shape: tuple[int, int, int], device: str, costs: tuple[float, ...] = ()
) -> dict[str, float]:
    """The predicted microseconds of each target that takes the shape and has a prediction."""
    algorithm, gate, _ = FAMILIES[family]
    heads, tokens, value_dim = shape
    text = _ops.explain(
        "prefill", algorithm, device, batch=1, tokens=tokens, sequences=1, heads=heads, value_heads=heads,
        key_dim=128, value_dim=value_dim, dtype="bfloat16", state_dtype="float32", gate=gate,
        lower_bound=-5.0, varlen=False, beta_per_value=False, checkpoints=False, chunk_states=False,
        tree=False, chunk_tokens=64, batch_invariant=False, costs=",".join(map(repr, costs)),
    )  # fmt: skip
    rows = (line.split("\t") for line in text.splitlines())
    return {target: float(time) for target, verdict, _, time, _ in rows if verdict != "no" and time}


def measure(device: str) -> Iterator[Point]:
    for family, (algorithm, gate, decay) in enumerate(FAMILIES):
        for shape in SHAPES:
            heads, tokens, value_dim = shape
            case = Case(
                algorithm, (tokens,), heads=heads, value_heads=heads, key_dim=128, value_dim=value_dim,
                gate=gate, decay=decay, qk_l2norm=algorithm in ("kda", "gdn"),
                beta_is_logit=algorithm in ("kda", "gdn"),
                gate_dtype=torch.float32 if gate == "log_decay" else torch.bfloat16,
            )  # fmt: skip
            inputs = make(case, gpu.DEVICE, draw_on=gpu.DEVICE)
            for backend in ways(family, shape, device):
                target, _, strategy = backend.partition(":")
                if strategy in ("whole", "segments") or (strategy and value_dim == 128):
                    seconds = gpu.device_seconds(bind(inputs, backend), REPEATS)
                    yield Point(family, target, strategy, *shape, 1e6 * seconds)


def bind(inputs: Inputs, backend: str) -> Call:
    prefill = PREFILL[inputs.case.algorithm]
    named = ("g", "beta", "erase", "a_key", "b_key", "decay")
    gates = {name: x for name in named if (x := getattr(inputs, name)) is not None}
    named = {**gates, **keywords(inputs), "out": torch.empty_like(inputs.v), "backend": backend}
    return lambda: prefill(inputs.q, inputs.k, inputs.v, **named, output_final_state=True)


def predict(points: list[Point], device: str, costs: tuple[float, ...]) -> None:
    for family, shape in {(p.family, p.shape) for p in points}:
        predicted = ways(family, shape, device, costs)
        for p in points:
            if (p.family, p.shape) == (family, shape):
                p.predicted = predicted.get(f"{p.target}:{p.strategy}", p.measured)


def error(points: list[Point], device: str, costs: tuple[float, ...]) -> float:
    """The sum of squares of the logarithms of predicted over measured."""
    predict(points, device, costs)
    return sum(math.log(p.predicted / p.measured) ** 2 for p in points if p.fitted)


def tied(costs: list[float], family: int) -> list[float]:
    """The costs, those of eight warps replaced by what those of four say."""
    prepare, carry, _, of_map, segment, _, *rest = costs
    wide = WIDE_SEGMENTS[FAMILIES[family][0] in ("gdn", "lightning")]
    return [prepare, carry, WIDE * carry, of_map, segment, wide * segment, *rest]


def fit(points: list[Point], device: str) -> tuple[float, ...]:
    """The costs of one family and target, by a search along one cost after another."""
    strategies = {p.strategy for p in points}
    needed = {"fused": "fused", "halves": "halves", "map": "segments", "segment": "segments"}
    costs = [
        cost if needed.get(name, "whole") in strategies else 0.0
        for cost, name in zip(START, COSTS, strict=True)
    ]
    family = points[0].family
    if family in PAIRED_ONLY:
        costs[-1] = 0.0
    if (points[0].target, family) in NO_OPERANDS:
        costs[0] = 0.0
    costs = tied(costs, family)
    best, step = error(points, device, tuple(costs)), 1.4
    for _ in range(ROUNDS):
        before = best
        for i, cost in enumerate(costs):
            for factor in (step, 1 / step):
                changed = tied([*costs[:i], cost * factor, *costs[i + 1 :]], family)
                if cost > 0 and (found := error(points, device, tuple(changed))) < best:
                    costs, best = changed, found
                    break
        if best == before:
            step = math.sqrt(step)
        if step < 1.002:
            break
    predict(points, device, tuple(costs))
    return tuple(costs)


def row(costs: tuple[float, ...]) -> str:
    """Costs in C++; those of joined segments stay as they are."""
    prepare, carry4, carry8, map_, segment4, segment8, halves, fused1, fused2 = (f"{x:.3g}" for x in costs)
    parts = [
        f".prepare = {prepare}",
        f".carry = {{{carry4}, {carry8}}}",
        f".map = {map_}",
        f".segment = {{{segment4}, {segment8}}}",
        f".halves = {halves}",
        f".fused = {{{fused1}, {fused2}}}",
    ]
    return "{" + ", ".join(part for part in parts if not part.endswith(("= 0", "{0, 0}"))) + "},"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fit", description=__doc__)
    parser.add_argument("--output", type=Path, help="the folder of results (default: bench/results)")
    options = parser.parse_args()
    gpu.prepare()
    device = f"cuda:{torch.cuda.current_device()}"
    points = list(measure(device))
    result: dict = {"head": machine.describe(gpu), "points": [], "costs": {}}
    for target in TARGETS:
        print(f"{target}:")
        for family, (algorithm, gate, _) in enumerate(FAMILIES):
            own = [p for p in points if (p.family, p.target) == (family, target)]
            if not own:
                continue
            costs = fit(own, device)
            result["costs"][f"{target} {algorithm} {gate}"] = costs
            result["points"] += [asdict(p) for p in own]
            print(f"    {row(costs)}  // {algorithm} {gate}")
            for shape in dict.fromkeys(p.shape for p in own):
                of = [p for p in own if p.shape == shape]
                first, least = min(of, key=lambda p: p.predicted), min(p.measured for p in of)
                times = "  ".join(f"{p.strategy} {p.measured:.0f} ({p.predicted:.0f})" for p in of)
                regret = 100 * (first.measured / least - 1)
                heads, tokens, value_dim = shape
                print(
                    f"        H{heads} T{tokens} V{value_dim}: {times}  -> {first.strategy}, +{regret:.1f} %"
                )
    folder = (options.output or RESULTS) / machine.file_safe(gpu.name())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
