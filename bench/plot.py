# SPDX-License-Identifier: Apache-2.0
"""python -m bench.plot: draw result files, time against length and the implementations side by side, beside them."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from bench.results import RESULTS, load


def time_of(row: dict) -> float:
    """Device time where it is known, else what the caller sees."""
    return row["call_ms"] if row["gpu_ms"] is None else row["gpu_ms"]


def draw_lengths(result: dict, path: Path) -> None:
    """µs per token of the prefill cases that differ in length alone (T1024-H16, T4096-H16, ...): flat is linear."""
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in result["cases"]:
        length, _, heads = row["case"].partition("-")
        if row["pass"] == "prefill" and length[1:].isdigit():
            tokens = int(length[1:])
            lines[row["op"], heads, row["impl"]].append((tokens, 1e3 * time_of(row) / tokens))
    lines = {key: sorted(points) for key, points in lines.items() if len(points) > 1 and not key[2].startswith("cula:")}
    if not lines:
        return
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colors = {op: f"C{i}" for i, op in enumerate(dict.fromkeys(op for op, _, _ in lines))}
    for (op, heads, impl), points in lines.items():
        style = {"cula": "-o", "eager_chunk": "--s"}.get(impl, ":^")
        axes.plot(*zip(*points, strict=True), style, color=colors[op], label=f"{op} {heads} {impl}")
    axes.set(yscale="log", xlabel="length (tokens)", ylabel="µs per token", title=result["device"])
    axes.set_xscale("log")
    lengths = sorted({tokens for points in lines.values() for tokens, _ in points})
    axes.set_xticks(lengths, [f"{tokens // 1024}K" for tokens in lengths], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_bars(result: dict, path: Path) -> None:
    """Every implementation's time in units of ours, a group per case that has more than ours."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for row in result["cases"]:
        groups[f"{row['op']} {row['case']}"][row["impl"]] = time_of(row)
    groups = {name: times for name, times in groups.items() if len(times) > 1 and "cula" in times}
    if not groups:
        return
    impls = list(dict.fromkeys(impl for times in groups.values() for impl in times if impl != "cula"))
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.16 * len(groups) * (1 + len(impls))), layout="constrained")
    width = 1 / (1 + len(impls))
    for i, impl in enumerate(impls):
        rows = [
            (at + i * width, times[impl] / times["cula"]) for at, times in enumerate(groups.values()) if impl in times
        ]
        axes.barh(*zip(*rows, strict=True), height=width, label=impl)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([at + 0.5 * (len(impls) - 1) * width for at in range(len(groups))], groups)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="time in units of cula's", title=result["device"])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    for path, result in load(parser.parse_args().results):
        draw_lengths(result, path.with_name(f"{path.stem}-length.png"))
        draw_bars(result, path.with_name(f"{path.stem}-impls.png"))


if __name__ == "__main__":
    main()
