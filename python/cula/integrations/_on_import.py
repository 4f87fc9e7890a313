# SPDX-License-Identifier: Apache-2.0
"""What is to be done as soon as a module is imported: `CULA_FLA=1` registers with FLA then, and vLLM's
modules are met when vLLM imports them.

A finder before all others knows one name. It lets the others find the module, acts once the module has run,
and leaves the list then. A look-up alone (`importlib.util.find_spec`) changes nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
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
        finder.act()
    else:
        sys.meta_path.insert(0, finder)
    return finder.forget


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str, then: Callable[[], object]) -> None:
        self._package, self._then = package, then
        self._look_up = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package or getattr(self._look_up, "under_way", False):
            return None
        self._look_up.under_way = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._look_up.under_way = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def act(self) -> None:
        try:
            self._then()
        except Exception as error:
            warnings.warn(f"cula is not registered: {error}", stacklevel=2)

    def imported(self) -> None:
        """The module has run. Only the first time counts, and not after `forget`."""
        if self in sys.meta_path:
            self.forget()
            self.act()

    def forget(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Another loader, which leaves no trace of this one in the module."""

    def __init__(self, inner: importlib.abc.Loader, finder: _Finder) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._finder.imported()

    def __getattr__(self, name: str) -> object:
        """What others ask a loader for before the module runs: its code, its files."""
        return getattr(self._inner, name)
