# SPDX-License-Identifier: Apache-2.0
"""python/cula.pth: a program that never imports cula has it all the same, where the environment says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cula_testing import packages
from cula_testing.process import run_python

pytestmark = pytest.mark.cpu_only("about the start of Python")

PYTHON = Path(__file__).parents[2] / "python"

# A start of Python that finds cula.pth, a look whether the projects are there, and then the program.
START = f"""
import importlib.util, site, sys, warnings

site.addsitedir({str(PYTHON)!r})
before = {{"cula", "torch", "_cula_startup"}} & sys.modules.keys()
importlib.util.find_spec("fla"), importlib.util.find_spec("transformers")
assert before == {{"cula", "torch", "_cula_startup"}} & sys.modules.keys()
"""


def run(program: str, *paths: Path, **environment: str) -> list[str]:
    path = ":".join([*map(str, paths), *filter(None, sys.path)])
    unset = {"CULA_FLA": "", "CULA_TRANSFORMERS": ""}
    return run_python("-c", START + program, **{**unset, "PYTHONPATH": path, **environment}).splitlines()


@pytest.mark.parametrize("project", ["fla", "transformers"])
@pytest.mark.parametrize(("value", "imported"), [("", False), ("0", False), ("1", True)])
def test_nothing_is_imported_before_the_project(tmp_path, project, value, imported):
    """And nothing at all where the variable does not ask for it. This FLA is none, and a warning says so."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("")
    program = f"""
print(sorted(before))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import {project}
print("cula.integrations.{project}" in sys.modules, *[str(each.message)[:34] for each in caught])
"""
    found = run(program, tmp_path, **{f"CULA_{project.upper()}": value})
    says = " cula is not registered: cula.integ" if project == "fla" and imported else ""
    assert found == [str(["_cula_startup"]), f"{imported}{says}"]


def test_models_of_transformers():
    pytest.importorskip("transformers")
    program = """
warnings.simplefilter("ignore")
from transformers.models.kimi_linear import modeling_kimi_linear

adapter = sys.modules["cula.integrations.transformers"]
print(f"{modeling_kimi_linear.__name__}.chunk_kimi_delta_attention" in adapter.register())
print(modeling_kimi_linear.chunk_kimi_delta_attention.__wrapped__.__module__ == modeling_kimi_linear.__name__)
"""
    assert run(program, CULA_TRANSFORMERS="1") == ["True", "True"]


def test_layers_of_fla():
    program = """
warnings.simplefilter("ignore")
import fla.layers

print(bool(sys.modules["cula.integrations.fla"].register()))
"""
    assert run(program, CULA_FLA="1", PYTHONPATH=packages.path_with_fla()) == ["True"]


def test_without_cula(tmp_path):
    """Another project's package of this name is left alone, and so is a Python that has none."""
    for name in ("_cula_startup.py", "cula.pth"):
        (tmp_path / name).write_text((PYTHON / name).read_text())
    program = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('_cula_startup' in sys.modules)"
    assert run_python("-I", "-c", program, CULA_FLA="1") == "True\n"
    (tmp_path / "cula").mkdir()
    (tmp_path / "cula" / "__init__.py").write_text("raise AssertionError")
    assert run_python("-I", "-c", program, CULA_FLA="1") == "True\n"
