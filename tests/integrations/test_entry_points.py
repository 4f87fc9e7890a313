# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that engines find by themselves: what `pyproject.toml` names is there."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_entry_points():
    tables = re.findall(r'\n\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"\n', PROJECT.read_text())
    loaded = {group: EntryPoint(name, value, group).load() for group, name, value in tables}
    assert {group: function.__module__ for group, function in loaded.items()} == {
        "sglang.srt.plugins": "cula.integrations.sglang", "vllm.general_plugins": "cula.integrations.vllm",
    }  # fmt: skip
    assert {function.__name__ for function in loaded.values()} == {"plug_in", "register"}
    assert {name for _, name, _ in tables} == {"cula"}
