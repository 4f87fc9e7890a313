# SPDX-License-Identifier: Apache-2.0
"""What hf_kernel.py writes holds every source, once for each backend. check_hub.py builds and runs it."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import jinja2
import pytest
import tomllib

import cula
import hf_kernel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    hf_kernel.main([str(folder), "--name", "a-name", "--version", "3", "--repo-id", "an-owner/a-name"])
    return folder, tomllib.loads((folder / "build.toml").read_text())


def compiled(build: dict, backend: str) -> list[str]:
    sections = [build["torch"], *(each for each in build["kernel"].values() if each["backend"] == backend)]
    return [path for each in sections for path in each["src"] if Path(path).suffix in (".cc", ".cpp", ".cu")]


def test_the_head(written):
    folder, build = written
    assert build["general"]["name"] == "a-name"
    assert (build["general"]["version"], build["general"]["edition"]) == (3, 5)
    assert build["general"]["hub"] == {"repo-id": "an-owner/a-name"}
    assert build["torch"]["stable-abi"] == {"cpu": "2.10", "cuda": "2.10"}
    assert {path.name for path in (folder / "torch-ext/a_name").iterdir()} == {
        "__init__.py", "layers.py", "_package",
    }  # fmt: skip


def test_the_functions_are_the_packages():
    """All of Level 1, and whatever the kernel names is there."""
    statements = ast.parse((ROOT / "hub" / "__init__.py").read_text()).body
    (exported,) = (ast.literal_eval(each.value) for each in statements if isinstance(each, ast.Assign))
    imported = {"layers"}
    for each in statements:
        if isinstance(each, ast.ImportFrom) and each.module:
            module = importlib.import_module(each.module.replace("_package", "cula"))
            imported |= {name.name for name in each.names if callable(getattr(module, name.name))}
    assert imported == set(exported)
    assert {name for name in cula.__all__ if name.startswith("cula_")} <= imported


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_source_is_compiled_once(written, backend):
    build = written[1]
    paths = compiled(build, backend)
    assert len(set(paths)) == len(paths)
    wanted = {
        str(path.relative_to(ROOT)) for top in ("src", "bindings") for path in ROOT.glob(f"{top}/**/*.cc")
    }
    if backend == "cpu":
        wanted = {path for path in wanted if not path.startswith("src/cuda/")}
    assert {path for path in paths if path.endswith(".cc") and "instances/" not in path} == wanted - {
        "src/cpu/isa.cc"
    }
    lines = [
        line
        for file in ROOT.glob("src/cuda/*/instances.txt")
        for line in file.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert len([path for path in paths if path.endswith(".cu")]) == (len(lines) if backend == "cuda" else 0)
    assert {Path(path).stem for path in paths if path.startswith("instances/cpu/")} == {
        "portable", "avx2", "avx512", "avx512bf16", "amx",
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_include_is_listed(written, backend):
    """kernel-builder copies what is listed, and nothing else."""
    folder, build = written
    sections = [build["torch"], *(each for each in build["kernel"].values() if each["backend"] == backend)]
    listed = {path for each in sections for path in each["src"]}
    for path in listed - {"torch-ext/torch_binding.cpp"}:
        text = (folder / path).read_text()
        for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            places = {f"{top}{name}" for top in ("src/", "include/", f"{Path(path).parent}/")}
            assert (backend == "cpu" and name.startswith("cuda/")) or places & listed, f"{path}: {name}"


def test_flags_are_those_of_cmake(written):
    section = written[1]["kernel"]["avx512bf16_cpu"]
    mine = [each for each in section["cxx-flags"] if "STREQUAL" in each]
    names = ["avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c", "avx512bf16"]
    assert mine == [f"$<$<STREQUAL:${{CMAKE_SYSTEM_PROCESSOR}},x86_64>:-m{name}>" for name in names]
    cmake = (ROOT / "cmake/CulaCpu.cmake").read_text()
    for flag in ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions"):
        assert flag in cmake
        assert flag in section["cxx-flags"]


@pytest.mark.parametrize("functions", [[], ["cula_kda", "explain"]])
def test_the_card_is_a_template(written, functions):
    """kernel-builder's templates are Jinja's, and these are the names that it gives them."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    card = environment.from_string((written[0] / "CARD.md").read_text())
    text = card.render(repo_id="an-owner/a-name", version=3, functions=functions, source=None)
    assert text.startswith("---\nlibrary_name: kernels\n")
    assert 'get_kernel("an-owner/a-name", version=3' in text
    assert ("- `cula_kda`" in text) == bool(functions)
    assert "{{" not in text


@pytest.mark.parametrize(
    ("architecture", "capability"),
    [
        ("80", "8.0+PTX"),
        ("90-real", "9.0"),
        ("90a-real", "9.0a"),
        ("120", "12.0+PTX"),
        ("103f-real", "10.3f"),
    ],
)
def test_capabilities(architecture, capability):
    assert hf_kernel.capability(architecture) == capability


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--name", "A_name"], "--name must be small letters"),
        (["--version", "-1"], "--version must be 0 or more"),
        ([], "is there already"),
    ],
)
def test_what_is_refused(tmp_path, capsys, arguments, sentence):
    folder = tmp_path if not arguments else tmp_path / "kernel"
    with pytest.raises(SystemExit):
        hf_kernel.main([str(folder), *arguments])
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
