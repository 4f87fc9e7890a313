# SPDX-License-Identifier: Apache-2.0
"""How flash-linear-attention chooses who runs a function: `fla.backends` from 0.6 on, `fla.ops.backends`
before.

Both keep registries of backends, by priority. In 0.6 a function has a registry of its own, or shares that of
an operation; in 0.5 all share. A function that has none is given one by FLA's own `dispatch()`. FLA has no
way to take a backend out again, hence the private names: read from versions 0.5.2 and 0.6.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ._functions import Substitute

BACKEND = "cula"
SWITCH = "FLA_CULA"
PRIORITY = 1  # the least number is asked first; FLA's own for NVIDIA GPUs begin at 3

_probe = threading.local()


def enabled() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


class _ReachedError(Exception):
    """A call came to this library's backend; FLA writes no log of one that raises."""


def answers(function: Callable[..., Any]) -> bool:
    """Whether a call of the function reaches this library's backend: one is made that nobody else takes."""
    _probe.under_way = True
    try:
        function(*[None] * 5)
    except _ReachedError:
        return True
    except Exception:  # of FLA's own code, which got None for tensors
        return False
    finally:
        _probe.under_way = False
    return False


def _probing() -> bool:
    return getattr(_probe, "under_way", False)


class _Registry(Protocol):
    _backends: dict[str, object]
    _logged: set[str]

    def register(self, backend: object) -> None: ...


class Registries:
    """FLA's registries, and what was changed in them."""

    def __init__(self) -> None:
        try:
            self._module = importlib.import_module("fla.backends")
            self._operations: dict[str, _Registry] = self._module._operation_registries
            self._functions: dict[Callable[..., Any], _Registry] | None = self._module._function_registries
        except ModuleNotFoundError as error:
            if error.name != "fla.backends":
                raise
            self._module = importlib.import_module("fla.ops.backends")
            self._operations = self._module.BackendRegistry._registries
            self._functions = None
        self._undo: list[Callable[[], None]] = []
        self._backend: type[_Backend] = type("CulaBackend", (_Backend, self._module.BaseBackend), {})

    @property
    def disabled(self) -> bool:
        """FLA read FLA_DISABLE_BACKEND_DISPATCH=1 when it was imported."""
        return bool(self._module._DISPATCH_DISABLED)

    def enter(self, theirs: Callable[..., Any], operation: str, substitute: Substitute) -> bool:
        """Whether FLA dispatches the function already, and asks the substitute from now on."""
        own = None if self._functions is None else self._functions.get(inspect.unwrap(theirs))
        # The module adds its backends where it is first needed, which must not be later than this.
        with contextlib.suppress(ImportError):
            importlib.import_module(
                "fla.modules.backends" if operation == "modules" else f"fla.ops.{operation}.backends"
            )
        for registry in (own, self._operations.get(operation)):
            if registry is None:
                continue
            functions = self._functions_of(registry)
            functions[substitute.name] = substitute
            if answers(theirs):
                return True
            del functions[substitute.name]
        return False

    def dispatch(
        self, theirs: Callable[..., Any], operation: str, substitute: Substitute
    ) -> Callable[..., Any] | None:
        """The function under FLA's own dispatch, which asks the substitute; None if FLA's does not work."""
        if self._functions is not None:
            key = inspect.unwrap(theirs)
            if key in self._functions:  # which did not answer
                return None
            made = self._module.dispatch(theirs)
            registry = self._functions[key]
            self._undo.append(functools.partial(self._functions.__delitem__, key))
        else:
            if operation not in self._operations:
                self._module.BackendRegistry(operation)  # which enters itself
                self._undo.append(functools.partial(self._operations.__delitem__, operation))
            registry = self._operations[operation]
            made = self._module.dispatch(operation)(theirs)
        functions_here = self._functions_of(registry)
        functions_here[substitute.name] = substitute
        if answers(made):
            return made
        # PyTorch before 2.11: torch.compiler.disable of a function that wraps a disabled one is the latter.
        del functions_here[substitute.name]
        return None

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _functions_of(self, registry: _Registry) -> dict[str, Substitute]:
        """The functions of this library's backend in the registry, which it enters if it is not there."""
        before = registry._backends.get(BACKEND)
        if isinstance(before, self._backend):
            return before.functions
        active = getattr(registry, "_active", None)
        backend = self._backend()
        registry.register(backend)

        def take_out() -> None:
            if registry._backends.get(BACKEND) is backend:
                del registry._backends[BACKEND]
                if before is not None:
                    registry._backends[BACKEND] = before
            if getattr(registry, "_active", None) is backend:
                setattr(registry, "_active", active)  # noqa: B010  # 0.5 alone has it
            registry._logged -= {key for key in registry._logged if BACKEND in key.split(":")}

        self._undo.append(take_out)
        return backend.functions


class _Backend:
    """The functions of this library in one of FLA's registries; a base beside FLA's own."""

    backend_type = BACKEND
    package_name = "cula"
    env_var = SWITCH
    default_enable = True
    priority = PRIORITY

    def __init__(self, **given: object) -> None:
        super().__init__(**given)
        self.functions: dict[str, Substitute] = {}

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_enabled(cls) -> bool:
        return enabled() or _probing()

    def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        substitute = self.functions.get(function_name)
        if substitute is None or _probing():
            return True, None
        return substitute.accepts(args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., object]:
        """The function that FLA asks for by its name."""
        substitute = self.__dict__.get("functions", {}).get(name)
        if substitute is None:
            raise AttributeError(f"{type(self).__name__} has no function {name!r}")

        def run(*args: Any, **kwargs: Any) -> object:
            if _probing():
                raise _ReachedError
            return substitute.run(args, kwargs)

        return run
