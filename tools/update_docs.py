# SPDX-License-Identifier: Apache-2.0
"""update_docs.py [--check]: fill the generated blocks of the Markdown files, or fail where one is not
current.

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import few_heads_tables
import hybrid_tables
import result_tables
import run_tables
import step_tables
import support_matrix
import training_tables
import version_tables

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "ALGORITHM.md",
    "README.md",
    "docs/benchmarks.md",
    "docs/distributed.md",
    "docs/fla-tests.md",
    "docs/fuzzing.md",
    "docs/gpu-tests.md",
    "docs/guide/integrations-transformers.md",
    "docs/guide/versions.md",
)
BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def cpp_example() -> list[str]:
    source = (ROOT / "examples" / "decode.cc").read_text()
    return ["```cpp", *source.splitlines()[2:], "```"]


# The kind of device; a build without its kernels leaves the table as it is.
SUPPORT = {"support-cuda": "cuda", "support-cpu": "cpu"}
GENERATORS: dict[str, Callable[[], list[str]]] = {
    "prefill": result_tables.prefill,
    "growth": result_tables.growth,
    "decode": result_tables.decode,
    "targets": result_tables.targets,
    "gpu-prefill": result_tables.gpu_prefill,
    "gpu-decode": result_tables.gpu_decode,
    "gpu-steps": step_tables.gpu_steps,
    "gpu-calls": result_tables.gpu_calls,
    "gpu-errors": result_tables.gpu_errors,
    "prefill-plot": result_tables.prefill_plot,
    "several-ranks": result_tables.several_ranks,
    **result_tables.SECTIONS,
    "prefill-few-heads": few_heads_tables.few_heads,
    "gpu-training": training_tables.gpu_training,
    "gpu-gradients": training_tables.gpu_gradients,
    "cpu-training": training_tables.cpu_training,
    "training": training_tables.readme,
    "hybrids": hybrid_tables.hybrids,
    "gpu-tests": run_tables.runs,
    "sanitizer": run_tables.sanitizer,
    "fla-tests": run_tables.fla,
    "fla-registry": functools.partial(run_tables.fla, "registry"),
    "fuzz": run_tables.fuzz,
    "cpp-example": cpp_example,
    "algorithms": support_matrix.algorithms,
    "versions-pinned": version_tables.pinned,
    "versions-runs": version_tables.runs,
    "versions-peers": version_tables.peers,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale, untold = [], []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()

        def fill(block: re.Match, name: str = name) -> str:
            old = block["body"].splitlines()
            if kind := SUPPORT.get(block["name"]):
                lines = support_matrix.matrix(kind, old)
            else:
                lines = GENERATORS[block["name"]]()
            if lines is None:
                untold.append(
                    f"docs: {name}: {block['name']} stays as it is: this build has no {kind.upper()} kernels"
                )
                return block[0]
            if lines != old:
                stale.append(f"{name}: {block['name']}")
            return block[1] + "\n".join(lines) + "\n" + block[4]

        filled = BLOCK.sub(fill, text)
        if not check:
            path.write_text(filled)
    for sentence in untold:
        print(sentence)
    if check and stale:
        print(
            f"update_docs: not current, run python tools/update_docs.py: {', '.join(stale)}", file=sys.stderr
        )
        return 1
    print("docs: generated blocks are current" if check else f"docs: updated {', '.join(stale) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
