# SPDX-License-Identifier: Apache-2.0
"""python -m bench.plot: draw result files, time against length and the implementations side by side, beside
them.

A section of the benchmark is one figure with a panel per series of its cases, <suite>.png; so are the cases
that differ in their heads too, shape by shape, and those of several ranks, as speed-ups.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

import cula
from bench.results import RESULTS, load

TITLES = {
    "prefill_fixed": "Prefill of sequences of one length",
    "prefill_ragged": "Prefill of ragged batches of 8 to 256 sequences",
    "prefill_short": "Prefill of short sequences",
    "prefill_models": "Prefill of one layer of a model, on one of its tensor-parallel ranks",
    "prefill_low_parallelism": "Prefill of one long sequence with few heads",
    "prefill_few_heads": "Prefill with few heads, by tokens, heads and sequences",
}
# Titles of ops that are not their names in capitals.
OPS = {
    "lightning": "Lightning",
    "delta": "DeltaNet",
    "gdn2": "GDN-2",
    "gdp": "gated DeltaProduct",
    "rwkv7": "RWKV-7",
}
PANELS_PER_ROW = 4

# Okabe and Ito's colours, told apart by every kind of eye, and a line and a marker of its own for each in
# grey print.
STYLES = {
    "cula": {
        "label": "cula",
        "color": "#0072B2",
        "linestyle": "-",
        "marker": "o",
        "linewidth": 2.2,
        "zorder": 4,
    },
    "flash_kda": {"label": "FlashKDA", "color": "#D55E00", "linestyle": "--", "marker": "s", "zorder": 3},
    "fla": {"label": "FLA", "color": "#009E73", "linestyle": "-.", "marker": "^", "zorder": 2},
    "cudnn": {"label": "cuDNN", "color": "#CC79A7", "linestyle": (0, (5, 1)), "marker": "D", "zorder": 2},
    "cudnn:given": {"label": "cuDNN, all given", "color": "#56B4E9", "linestyle": ":", "marker": "v"},
    "cudnn:whole": {"label": "cuDNN, whole call", "color": "#E69F00", "linestyle": "-.", "marker": "X"},
    "flashinfer": {"label": "FlashInfer", "color": "#E69F00", "linestyle": "--", "marker": "P", "zorder": 2},
    "cula:sm90:joined": {"label": "cula, joined", "color": "#0072B2", "linestyle": "--", "marker": "^"},
    "floor": {"label": "floor", "color": "#7A7A7A", "linestyle": ":", "linewidth": 1.6, "zorder": 1},
}
# A page of its own, so that a dark README shows it as a light one does.
PAGE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "lines.markersize": 5,
    "font.size": 10,
}

Series = dict[str, list[tuple[float, float]]]  # implementation: (length, milliseconds)


def time_of(row: dict) -> float:
    """Device time where it is known, else what the caller sees."""
    return row["call_ms"] if row["gpu_ms"] is None else row["gpu_ms"]


def draw_lengths(result: dict, path: Path) -> None:
    """µs per token of the prefill cases that differ in length alone (T1024-H16, T4096-H16, ...): flat is
    linear."""
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in result["cases"]:
        length, _, heads = row["case"].partition("-")
        if row["pass"] == "prefill" and length[1:].isdigit():
            tokens = int(length[1:])
            lines[row["op"], heads, row["impl"]].append((tokens, 1e3 * time_of(row) / tokens))
    lines = {
        key: sorted(points)
        for key, points in lines.items()
        if len(points) > 1 and not key[2].startswith("cula:")
    }
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
    figure, axes = plt.subplots(
        figsize=(9, 0.6 + 0.16 * len(groups) * (1 + len(impls))), layout="constrained"
    )
    width = 1 / (1 + len(impls))
    for i, impl in enumerate(impls):
        rows = [
            (at + i * width, times[impl] / times["cula"])
            for at, times in enumerate(groups.values())
            if impl in times
        ]
        axes.barh(*zip(*rows, strict=True), height=width, label=impl)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([at + 0.5 * (len(impls) - 1) * width for at in range(len(groups))], groups)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="time in units of cula's", title=result["device"])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def op_title(op: str) -> str:
    return OPS.get(op, op.upper())


def _count(value: float, _position: int = 0) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def panels_of(result: dict) -> dict[tuple[str, str], Series]:
    """Times of the cases of each panel with their floor, by tokens, or by mean length where all have as many
    tokens."""
    rows: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for row in result["cases"]:
        rows[row["op"], row["panel"]].append(row)
    panels: dict[tuple[str, str], Series] = {}
    order = list(cula.algorithms())
    for key in sorted(rows, key=lambda key: order.index(key[0])):
        ragged = _by_mean_length(rows[key])
        series: Series = defaultdict(list)
        for row in rows[key]:
            length = row["tokens"] / row["sequences"] if ragged else row["tokens"]
            series[row["impl"]].append((length, time_of(row)))
            if row["impl"] == "cula":
                series["floor"].append((length, row["gb"] / result["copy_tbps"]))
        panels[key] = {impl: sorted(points) for impl, points in series.items()}
    return panels


def _by_mean_length(rows: list[dict]) -> bool:
    return len({row["sequences"] for row in rows}) > 1 and len({row["tokens"] for row in rows}) == 1


def _scale(axes: plt.Axes, series: list[Series]) -> None:
    """Of all panels, which share their axes: lengths at powers of two, times at 1, 2 and 5 where there is
    room."""
    lengths, times = zip(
        *(point for each in series for points in each.values() for point in points), strict=True
    )
    shortest, longest = min(lengths), max(lengths)
    step = 4 if longest > 32 * shortest else 2
    ticks = [shortest]
    while ticks[-1] * step <= longest:
        ticks.append(ticks[-1] * step)
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_count))
    if max(times) < 30 * min(times):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: plt.Figure, copy_tbps: float) -> None:
    found = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    found[f"floor: the bytes at a copy's {copy_tbps:.2f} TB/s"] = found.pop(STYLES["floor"]["label"])
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False)


def draw_section(result: dict, path: Path) -> None:
    """Time against length, a panel per series, every implementation and the floor in each."""
    panels, rows = panels_of(result), result["cases"]
    columns = min(PANELS_PER_ROW, len(panels))
    height = -(-len(panels) // columns)
    with plt.rc_context(PAGE):
        size = (1 + 2.7 * max(columns, 2), 1.3 + (2.4 if height < 3 else 1.9) * height)
        shared = {"sharex": True, "sharey": True, "squeeze": False}
        figure, grid = plt.subplots(height, columns, figsize=size, layout="constrained", **shared)
        for axes, ((op, panel), series) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(f"{op_title(op)}, {panel}", fontsize="small")
            for impl, points in series.items():
                axes.plot(*zip(*points, strict=True), **STYLES.get(impl, {"label": impl, "marker": "."}))
            axes.grid()
        _scale(grid[0, 0], list(panels.values()))

        by_mean = f"mean length (tokens) of {_count(rows[0]['tokens'])} in all"
        across = by_mean if _by_mean_length(rows) else "length (tokens)"
        for i, axes in enumerate(grid.flat):
            axes.set_visible(i < len(panels))
            if i + columns >= len(panels):  # nothing below it
                axes.set_xlabel(across, fontsize="small")
                axes.tick_params(labelbottom=True)
        timed = "time of a call (ms)" if rows[0]["gpu_ms"] is None else "device time (ms)"
        for axes in grid[:, 0]:
            axes.set_ylabel(timed, fontsize="small")

        dims = sorted({row["key_dim"] for row in rows} | {row["value_dim"] for row in rows})
        figure.suptitle(
            f"{TITLES.get(rows[0]['suite'], rows[0]['suite'])}\n{result['device']}, {rows[0]['dtype']},"
            f" heads of {', '.join(map(str, dims))}"
        )
        _legend(figure, result["copy_tbps"])
        figure.savefig(path, dpi=150)
        plt.close(figure)


def has_shapes(result: dict) -> bool:
    """Whether a panel has cases of several numbers of heads, which are on no common line."""
    heads: dict[str, set[int]] = defaultdict(set)
    for row in result["cases"]:
        heads[row["panel"]].add(row["heads"])
    return max(map(len, heads.values())) > 1


def draw_shapes(result: dict, path: Path) -> None:
    """Time of every shape, a panel per kind of data, every implementation and the floor in each."""
    panels: dict[str, dict[str, dict[str, float]]] = {}  # panel: shape: implementation: milliseconds
    for row in result["cases"]:
        shape = f"T{row['tokens']}-H{row['heads']}-N{row['sequences']}"
        times = panels.setdefault(row["panel"], {}).setdefault(shape, {})
        times[row["impl"]] = time_of(row)
        if row["impl"] == "cula":
            times["floor"] = row["gb"] / result["copy_tbps"]
    shapes = list(dict.fromkeys(shape for cases in panels.values() for shape in cases))
    impls = [
        impl for impl in STYLES if any(impl in times for cases in panels.values() for times in cases.values())
    ]
    with plt.rc_context(PAGE):
        size = (3 + 0.6 * max(len(shapes), 6), 1.6 + 2.6 * len(panels))
        figure, column = plt.subplots(
            len(panels), 1, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
        )
        for axes, (panel, cases) in zip(column.flat, panels.items(), strict=True):
            axes.set_title(panel, fontsize="small")
            for impl in impls:
                points = [
                    (i, cases[shape][impl]) for i, shape in enumerate(shapes) if impl in cases.get(shape, {})
                ]
                if points:
                    style = {**STYLES[impl], "linestyle": "none"}
                    style |= {"marker": "_", "markersize": 14} if impl == "floor" else {}
                    axes.plot(*zip(*points, strict=True), **style)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
            axes.grid(axis="y")
            timed = "time of a call (ms)" if result["cases"][0]["gpu_ms"] is None else "device time (ms)"
            axes.set_ylabel(timed, fontsize="small")
        column[-1, 0].set_xticks(range(len(shapes)), shapes, rotation=40, ha="right", fontsize="small")
        suite, op = result["cases"][0]["suite"], result["cases"][0]["op"]
        figure.suptitle(f"{op_title(op)}: {TITLES.get(suite, suite)}\n{result['device']}")
        _legend(figure, result["copy_tbps"])
        figure.savefig(path, dpi=150)
        plt.close(figure)


# Of several ranks: what is drawn, each beside what it is faster than.
SPEEDUPS = {
    "cula:scan": {"label": "scan", "color": "#0072B2", "linestyle": "-", "marker": "o"},
    "cula:ring": {"label": "ring", "color": "#E69F00", "linestyle": ":", "marker": "s"},
    "fla": {"label": "FLA, beside its one rank", "color": "#009E73", "linestyle": "-.", "marker": "^"},
}


def speedups_of(result: dict) -> dict[str, Series]:
    """Case: implementation: (ranks, how much faster than one rank). On GPUs by device time alone."""
    times: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for row in result["cases"]:
        if result["driver"] is not None and row["gpu_ms"] is None:
            continue
        case = row["case"].rpartition("-x")[0]
        times[f"{op_title(row['op'])} {case}"][row["impl"], row["gpus"]] = time_of(row)
    found: dict[str, Series] = {}
    for case, measured in times.items():
        found[case] = {}
        for impl in SPEEDUPS:
            one = measured.get(("fla" if impl == "fla" else "cula", 1))
            points = [
                (ranks, one / taken)
                for (name, ranks), taken in measured.items()
                if one and name == impl and ranks > 1
            ]
            if points:
                found[case][impl] = [(1, 1.0), *sorted(points)]
    return found


def draw_speedups(result: dict, path: Path) -> None:
    """Speed-up against ranks, a panel per case."""
    panels = speedups_of(result)
    with plt.rc_context(PAGE):
        size = (1.5 + 3.2 * len(panels), 3.9)
        figure, grid = plt.subplots(
            1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False
        )
        for axes, (case, series) in zip(grid.flat, panels.items(), strict=True):
            ranks = sorted({int(each) for points in series.values() for each, _ in points} | {1})
            axes.plot(ranks, ranks, color="#7A7A7A", linewidth=1, label="as many times as ranks")
            for impl, points in series.items():
                axes.plot(*zip(*points, strict=True), **SPEEDUPS[impl])
            axes.set_title(case, fontsize="small")
            axes.set_xticks(ranks)
            axes.set_xlabel("ranks", fontsize="small")
            axes.grid()
        grid[0, 0].set_ylabel("speed-up", fontsize="small")
        figure.suptitle(f"One sequence over several ranks\n{result['device']}")
        handles = {
            label: handle
            for axes in grid.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize="small",
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    for path, result in load(parser.parse_args().results):
        if not result["cases"]:  # all refused
            continue
        if all("gpus" in row for row in result["cases"]):
            draw_speedups(result, path.with_suffix(".png"))
        elif any(row.get("panel") for row in result["cases"]) and has_shapes(result):
            draw_shapes(result, path.with_suffix(".png"))
        elif any(row.get("panel") for row in result["cases"]):
            draw_section(result, path.with_suffix(".png"))
        else:
            draw_lengths(result, path.with_name(f"{path.stem}-length.png"))
            draw_bars(result, path.with_name(f"{path.stem}-impls.png"))


if __name__ == "__main__":
    main()
