# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of vLLM and SGLang beside the engines' own modules, where those are installed: what a plug-in
stands for or extends has the same signature in both."""

# ruff: noqa: ARG005  (signatures alone)

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from cula.integrations import sglang, vllm
from cula_testing import packages, sglang_stand_in, vllm_stand_in

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
LAYER = (
    "QwenGatedDeltaNetAttention._forward_core", "QwenGatedDeltaNetAttention._warmup_prefill_kernels",
    "QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode", "QwenGatedDeltaNetAttention.get_state_dtype",
    "ChunkGatedDeltaRule.forward_native",
)  # fmt: skip
METHODS = ("decode", "packed_decode", "extend", "target_verify")
VLLM = {**{path: tuple(names) for path, names in vllm._FUNCTIONS.items()}, vllm_stand_in.GDN_LAYER: LAYER}
SGLANG = {
    path: tuple(f"{kernel}.{method}" for method in METHODS)
    for path, _, kernel in sglang._DISPATCHERS.values()
}


def found(module: ModuleType, name: str) -> Callable:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def differences(ours: Callable, theirs: Callable) -> Iterator[str]:
    """By their names. A signature that ends in `**kwargs` has every name."""
    mine, real = (inspect.signature(each).parameters for each in (ours, theirs))
    for one, other, where in ((mine, real, "the engine's"), (real, mine, "the stand-in's")):
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in other.values()):
            continue
        yield from (
            f"{name} is not {where}"
            for name, each in one.items()
            if name not in other and each.kind not in VARIABLE
        )
    common = [name for name in mine if name in real and mine[name].kind not in VARIABLE]
    yield from (f"{name} differs" for name in common if mine[name].default != real[name].default)
    yield from (f"{name} is of another kind" for name in common if mine[name].kind != real[name].kind)
    if common != sorted(common, key=list(real).index):
        yield f"the order is {', '.join(name for name in real if name in common)}"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (lambda a, b=1: 0, lambda a, b=1: 0, []),
        (lambda a, **kwargs: 0, lambda a, b=1, c=2: 0, []),
        (lambda a, b=1: 0, lambda a, **kwargs: 0, []),
        (lambda a, b: 0, lambda b, a: 0, ["the order is b, a"]),
        (lambda a, b=1: 0, lambda a, b=2: 0, ["b differs"]),
        (lambda a, b: 0, lambda a, *, b: 0, ["b is of another kind"]),
        (lambda a, b: 0, lambda a, c: 0, ["b is not the engine's", "c is not the stand-in's"]),
    ],
)
def test_what_differs(ours, theirs, said):
    assert list(differences(ours, theirs)) == said


@pytest.mark.parametrize(
    ("stand_in", "names"), [(vllm_stand_in, VLLM), (sglang_stand_in, SGLANG)], ids=["vllm", "sglang"]
)
def test_the_stand_in_has_the_engines_signatures(stand_in, names):
    engine = next(iter(names)).partition(".")[0]
    with pytest.MonkeyPatch.context() as patch:
        stand_in.install(patch)
        ours = {path: importlib.import_module(path) for path in names}
        packages.remove(engine)
    try:
        pytest.importorskip(engine, exc_type=ImportError)
        said = []
        for path in names:
            theirs = pytest.importorskip(path, exc_type=ImportError)
            for name in names[path]:
                different = differences(found(ours[path], name), found(theirs, name))
                said += [f"{path}.{name}: {each}" for each in different]
        assert not said
    finally:  # where the engine's own modules would stand in the way of the next stand-in
        packages.remove(engine)
