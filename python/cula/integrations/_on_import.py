# SPDX-License-Identifier: Apache-2.0
"""What is to be done as soon as a module is imported: `CULA_FLA=1` registers with FLA then, and vLLM's
modules are met when vLLM imports them.

A finder before all others knows one name. It leaves the list when that name is imported, lets the others find
the module, and acts once the module has run.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(package: str, then: Callable[[], object]) -> Callable[[], None]:
    """Calls `then` after the package or module has been imported, at once if it has been. What `then` raises
    becomes a warning: the import is not of this library. Returns a function that takes this back, as long as
    the import has not been."""
    finder = _Finder(package, then)
    if package in sys.modules:
        _call(then)
    else:
        sys.meta_path.insert(0, finder)

    def forget() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return forget


def _call(then: Callable[[], object]) -> None:
    try:
        then()
    except Exception as error:
        warnings.warn(f"cula is not registered: {error}", stacklevel=2)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str, then: Callable[[], object]) -> None:
        self._package, self._then = package, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package or self not in sys.meta_path:
            return None
        at = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:  # it may be imported later, from a path that is added
            sys.meta_path.insert(at, self)
            return spec
        spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, which leaves no trace of this one in the module."""

    def __init__(self, inner: importlib.abc.Loader, then: Callable[[], object]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _call(self._then)
