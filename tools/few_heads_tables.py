# SPDX-License-Identifier: Apache-2.0
"""The Markdown table of prefills with few heads from bench/results, for tools/update_docs.py."""

from __future__ import annotations

import json

from result_tables import (
    as_table,
    cases_of,
    errors_beside_fla,
    gpu_caption,
    peers_in,
    plots,
    times_as_long,
    wrapped,
)

SUITE = "prefill_few_heads"
NOT_YET = [f"Not measured yet: run `python -m bench --suite {SUITE}` on a machine with a GPU."]


def few_heads() -> list[str]:
    """Of each GPU its plot, the geometric means, and each shape beside the floor and the peers."""
    lines: list[str] = []
    shown = plots(SUITE, "../bench/results", "times by shape")
    results = {path: json.loads(path.read_text()) for path in shown}
    peers = peers_in([cases_of(result) for result in results.values()])
    for path, result in results.items():
        cases = {key: impls for key, impls in cases_of(result).items() if "cula" in impls}
        rows = []
        for (_, case), impls in cases.items():
            ours = impls["cula"]
            floor = ours["gb"] / result["copy_tbps"]
            rows.append(
                [
                    ours["panel"],
                    case,
                    f"{1e3 * ours['gpu_ms']:.1f}",
                    f"{1e3 * floor:.1f}",
                    f"{ours['gpu_ms'] / floor:.1f} x",
                    *(times_as_long(impls.get(name), ours) for name in peers),
                ]
            )
        head = [
            "gates",
            "case",
            "µs",
            "floor µs",
            "over floor",
            *(f"{name} takes" for name in peers.values()),
        ]
        lines += [
            *wrapped(gpu_caption(result)),
            *shown[path],
            *_means(result, peers),
            *as_table(head, rows),
            "",
        ]
        lines += [*errors_beside_fla(cases), ""]
    return lines[:-1] or NOT_YET


def _means(result: dict, peers: dict[str, str]) -> list[str]:
    """A row for each kind of gates that anybody was measured on whole; none, no table."""
    means: dict[tuple[str, int], dict[str, float]] = {}
    for mean in result.get("means", ()):
        means.setdefault((mean["panel"], mean["cases"]), {})[mean["impl"]] = mean["ms"]
    if not means:
        return []
    names = {"cula": "cula", **peers}
    rows = [
        [f"{panel}, {count} shapes", *(f"{1e3 * ms[each]:.1f}" if each in ms else "-" for each in names)]
        for (panel, count), ms in means.items()
    ]
    return [*as_table(["geometric mean, µs", *(title.rstrip(",") for title in names.values())], rows), ""]
