# SPDX-License-Identifier: Apache-2.0
"""The Markdown table of hybrid models of transformers from bench/results, for tools/update_docs.py."""

from __future__ import annotations

import json
from pathlib import Path

from result_tables import as_table, prose

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
NONE_YET = ["Not measured yet: run `python -m bench.hybrids` on a quiet machine."]
HEADER = [
    "model",
    "call",
    "transformers, ms",
    "cula, ms",
    "faster",
    "products, ms",
    "cula's operators, ms",
    "difference",
]


def of_result(result: dict) -> list[str]:
    rows = []
    for row in result["cases"]:
        theirs, ours = row["transformers_ms"], row["cula_ms"]
        digits = 0 if theirs >= 100 else 1
        rows.append(
            [
                row["model"],
                row["call"],
                f"{theirs:.{digits}f}",
                f"{ours:.{digits}f}",
                f"{theirs / ours:.1f} x",
                f"{row['products_ms']:.{digits}f}",
                f"{row['own_ms']:.{digits}f}",
                f"{row['difference']:.1e}",
            ]
        )
    caption = (
        f"{result['device']}, bf16 matrix product {result['product_tflops']:.2f} TFLOP/s, load "
        f"{result['load']:.1f} at its end; torch {result['torch']}, transformers {result['transformers']}; "
        f"best of {result['turns']} turns; sources `{result['source_hash']}`."
    )
    return [*prose(caption), "", *as_table(HEADER, rows)]


def hybrids() -> list[str]:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/transformers.json"))]
    lines: list[str] = []
    for result in found:
        lines += ["", *of_result(result)] if lines else of_result(result)
    return lines or NONE_YET
