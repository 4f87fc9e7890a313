# SPDX-License-Identifier: Apache-2.0
"""Whether check_tree.py finds what is planted."""

from __future__ import annotations

import pytest

import check_tree

PLANTED = {
    "another architecture": (
        "src/cuda/sm90/carry/kernel.cuh",
        '#include "cuda/sm80/carry.cuh"\n',
        "may not include",
    ),
    "one kernel another": (
        "src/cuda/recurrent/step.cuh",
        '#include "cuda/chunked/chunk.cuh"\n',
        "may not include",
    ),
    "upwards": ("src/cuda/ptx/mma.cuh", '#include "cuda/chunked/chunk.cuh"\n', "may not include"),
    "a new architecture": (
        "src/cuda/sm100/carry.cuh",
        "#include <cstdint>\n",
        "must say what src/cuda/sm100",
    ),
    "an architecture whose code is another's": (
        "src/cuda/ptx/mma.cuh",
        "#pragma once\n#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200\n",
        ":2: compares __CUDA_ARCH__ with 1200",
    ),
    "an absolute import": (
        "python/cula/x.py",
        "def f():\n    import cula.api\n",
        ":2: the package must import",
    ),
    "an absolute name": ("python/cula/dist/x.py", "from cula import api\n", ":1: the package must import"),
    "a long file": ("src/core/x.cc", "\n" * 601, "601 lines, at most 600"),
    "a long line": ("python/cula/x.py", "#" * 111, ":1: 111 columns, at most 110"),
    "a long line of prose": ("docs/api.md", "words\n" + "x" * 101, ":2: 101 columns, at most 100"),
    "a long address in prose": ("docs/api.md", f"https://{'x' * 100}\n", ":1: 108 columns, at most 100"),
    "prose behind code": ("docs/api.md", f"```\nx\n```\n{'x' * 101}\n", ":4: 101 columns, at most 100"),
    "prose of a list": ("docs/api.md", f"- words\n    {'x' * 97}\n", ":2: 101 columns, at most 100"),
    "prose behind a generated block": (
        "docs/api.md",
        f"<!-- generated: x -->\n{'x' * 200}\n<!-- end -->\n{'x' * 101}\n",
        ":4: 101 columns, at most 100",
    ),
    "long code of a page": ("docs/api.md", f"```\n{'x' * 111}\n```\n", ":2: 111 columns, at most 110"),
    "a long table": ("docs/api.md", f"| {'x' * 107} |\n", ":1: 111 columns, at most 110"),
    "a long line of the log": ("docs/log/x.md", "x" * 111, ":1: 111 columns, at most 110"),
    "a long line of the changelog": ("CHANGELOG.md", "x" * 101, ":1: 101 columns, at most 100"),
    "a long page": ("docs/design/x.md", "```\n```\n" + "\n" * 149, "151 lines, at most 150"),
    "no drawing": ("docs/design/x.md", "words\n", "has no drawing"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(what):
    path, text, sentence = PLANTED[what]
    (problem,) = check_tree.problems(path, text)
    assert problem.startswith(path)
    assert sentence in problem


def test_what_is_right_passes():
    text = '#include "cuda/chunked/chunk.cuh"\n#include "cuda/ptx/mma.cuh"\n#include <cstdint>\n'
    assert not list(check_tree.problems("src/cuda/sm80/carry.cuh", text))
    assert not list(check_tree.problems("python/cula/x.py", "from . import api\nimport culaxx\n"))
    assert not list(check_tree.problems("tests/x.py", "import cula\n"))
    table = f"words\n<!-- generated: x -->\n| {'x' * 200} |\n<!-- end -->\n"
    assert not list(check_tree.problems("docs/api.md", table))
    wide = f"{'x' * 100}\n\n```\n{'x' * 110}\n```\n\n    {'x' * 100}\n    {'x' * 106}\n\n| {'x' * 106} |\n"
    assert not list(check_tree.problems("docs/api.md", wide))
    assert not list(check_tree.problems("docs/log/x.md", f"{'x' * 110}\n\n| {'x' * 200} |\n"))


def test_a_kernel_that_needs_too_many_files(tmp_path, monkeypatch):
    """Files that are included by others count; the vocabulary does not."""
    folder = tmp_path / "src/cuda/chunked"
    folder.mkdir(parents=True)
    (tmp_path / "src/cuda/ptx").mkdir()
    (tmp_path / "src/cuda/ptx/mma.cuh").write_text("")
    for i in range(13):
        (folder / f"part{i}.cuh").write_text(f'#include "cuda/chunked/part{i + 1}.cuh"\n' if i < 12 else "")
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    kernel = folder / "kernel.cuh"
    for first, found in ((1, 0), (0, 1)):
        includes = "cuda/ptx/mma.cuh", f"cuda/chunked/part{first + 1}.cuh"
        kernel.write_text("".join(f'#include "{each}"\n' for each in includes) + "__global__ void f();\n")
        problems = list(check_tree.kernels(["src/cuda/chunked/kernel.cuh", "src/cuda/chunked/part0.cuh"]))
        assert len(problems) == found
    assert "needs 13 files to be read, at most 12" in problems[0]
