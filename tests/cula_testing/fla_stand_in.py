# SPDX-License-Identifier: Apache-2.0
"""A package `fla` that has what `cula.integrations.fla` meets of flash-linear-attention: its registries of
backends, and functions that say that they ran.

Written from what versions 0.5.2 and 0.6.0 do, not from their text. The adapter's own logic is tested on it;
tests/integrations/fla_layers.py asks FLA itself.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import cula

OPERATORS = {
    "kda": ["chunk_kda", "fused_recurrent_kda"],
    "gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
    "gdn2": ["chunk_gdn2", "fused_recurrent_gdn2"],
    "gated_delta_product": ["chunk_gated_delta_product"],
    "rwkv7": ["chunk_rwkv7", "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7"],
    "generalized_delta_rule.dplr": ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"],
    "gla": ["chunk_gla", "fused_recurrent_gla"],
    "simple_gla": ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"],
    "delta_rule": ["chunk_delta_rule", "fused_recurrent_delta_rule"],
    "lightning_attn": ["chunk_lightning_attn", "fused_recurrent_lightning_attn"],
    "linear_attn": ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"],
    "retention": ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"],
}
OURS = {
    "gated_delta_rule": "gdn",
    "lightning_attn": "lightning",
    "generalized_delta_rule.dplr": "generalized_delta_rule",
}


class BaseBackend:
    backend_type, package_name, env_var, default_enable, priority = "base", None, None, True, 5

    def __init__(self, *, env_var: str | None = None) -> None:
        if env_var is not None:
            self.env_var = env_var

    @classmethod
    def is_available(cls) -> bool:
        return True

    def is_enabled(self) -> bool:
        return os.environ.get(self.env_var or "", "1") != "0"

    def get_implementation(self, name: str) -> Callable | None:
        return getattr(self, name, None)

    def verify(self, name: str, *args, **kwargs) -> tuple[bool, str | None]:
        verifier = getattr(self, f"{name}_verifier", None)
        return (True, None) if verifier is None else verifier(*args, **kwargs)


class BackendRegistry:
    def __init__(self, name: str) -> None:
        self.operation_name, self._logged = name, set()
        self._backends: dict[str, BaseBackend] = {}

    def register(self, backend: BaseBackend) -> None:
        self._backends[backend.backend_type] = backend

    def choose(self, function: Callable, name: str, args: tuple, kwargs: dict):
        for backend in sorted(self._backends.values(), key=lambda each: each.priority):
            if not (backend.is_available() and backend.is_enabled()):
                continue
            key = f"{self.operation_name}:{name}:{backend.backend_type}"
            accepted, _ = backend.verify(name, *args, **kwargs)
            if not accepted:
                self._logged.add(f"{key}:fail")
            elif (run := getattr(backend, name, None)) is not None:
                made = run(*args, **kwargs)
                self._logged.add(key)
                return made
        return function(*args, **kwargs)


def own_code(name: str, signature: inspect.Signature) -> Callable:
    """A function of FLA's that the stand-in leaves to FLA: it returns its name, and fails on None, as code
    does that expects tensors."""

    def function(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        return next(iter(bound.values())).shape and f"FLA's own {name}"

    function.__name__ = function.__qualname__ = name
    function.__signature__ = signature
    return function


def install(patch: pytest.MonkeyPatch, version: str, *, dead: bool = False, disabled: bool = False) -> None:
    """Puts the package into sys.modules, until the test ends.

    version: "0.5", where registries belong to operations, or "0.6", where functions have some of their own.
    dead: FLA's dispatch gives back the bare function, as its 0.5 does under PyTorch 2.10.
    disabled: FLA_DISABLE_BACKEND_DISPATCH=1.
    """
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        patch.delitem(sys.modules, name)

    def module(name: str, **attributes: object) -> ModuleType:
        made = ModuleType(name)
        made.__path__ = []
        vars(made).update(attributes)
        patch.setitem(sys.modules, name, made)
        return made

    operations: dict[str, BackendRegistry] = {}
    functions: dict[Callable, BackendRegistry] = {}

    class Registry(BackendRegistry):
        _registries = operations

        def __init__(self, name: str) -> None:
            super().__init__(name)
            if version == "0.5":
                operations[name] = self

    def wrap(function: Callable, registry: Callable[[], BackendRegistry | None]) -> Callable:
        if dead or disabled:
            return function

        def wrapper(*args, **kwargs):
            found = registry()
            if found is None:
                return function(*args, **kwargs)
            return found.choose(function, function.__name__, args, kwargs)

        wrapper.__name__, wrapper.__wrapped__ = function.__name__, function
        return wrapper

    def dispatch(entry):
        if isinstance(entry, str):
            return lambda function: wrap(function, lambda: operations.get(entry))
        if not disabled:
            functions[entry] = Registry(entry.__name__)
        return wrap(entry, lambda: functions[entry])

    door = {"BaseBackend": BaseBackend, "BackendRegistry": Registry, "dispatch": dispatch}
    door["_DISPATCH_DISABLED"] = disabled
    module("fla", __version__=f"{version}.0")
    module("fla.ops")
    module("fla.modules")
    layers = module("fla.layers")
    if version == "0.6":
        door |= {"_operation_registries": operations, "_function_registries": functions}
        module("fla.backends", **door)
    else:
        module("fla.ops.backends", **door)
    for operation, names in OPERATORS.items():
        package = module(f"fla.ops.{operation}")
        if operation in ("kda", "gated_delta_rule"):
            operations[operation] = Registry(operation)
        for name in names:
            ours = getattr(getattr(cula, OURS.get(operation, operation)), name)
            function = own_code(name, inspect.signature(ours))
            if name == "chunk_kda" and version == "0.6":
                function = dispatch(function)
            elif name in ("chunk_kda", "chunk_gated_delta_rule"):
                function = dispatch(operation)(function)
            setattr(package, name, function)
            setattr(layers, name, function)
    parts = module("fla.modules.l2norm")
    parts.l2norm = own_code(
        "l2norm", inspect.Signature([inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    )
