# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib

import pytest

from cula.integrations import _vllm_functions, vllm
from cula_testing import packages
from cula_testing import vllm_stand_in as stand_in


@pytest.fixture
def engine(monkeypatch):
    """The module of the GDN layer in a stand-in of vLLM, where nothing is registered yet."""
    stand_in.install(monkeypatch)
    monkeypatch.delenv("CULA_VLLM", raising=False)
    vllm.calls.clear()
    importlib.import_module(stand_in.OPERATORS)
    yield importlib.import_module(stand_in.GDN_LAYER)
    vllm.unregister()
    vllm.calls.clear()
    _vllm_functions.enabled.update(_vllm_functions.PASSES)
    packages.remove("vllm")
