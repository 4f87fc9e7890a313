# SPDX-License-Identifier: Apache-2.0
"""A function of another project and the one here that may run its calls."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ._calls import Calls

# What the functions here raise before they run anything: a call that they do not take, or that is wrong.
REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError, Warning)


class Substitute:
    """Runs calls of `theirs` by `ours`, where `ours` takes them.

    `ours` decides itself: it refuses a call before it has run or written anything, and its error is the
    reason. So `accepts` makes the call, and `run` hands out what it made: nothing is checked twice, and no
    second list of conditions can differ from the first. Errors that are no refusals are raised by `run`.
    """

    def __init__(
        self,
        name: str,
        theirs: Callable[..., Any],
        ours: Callable[..., Any],
        calls: Calls,
        runs_as: str = "cula",
    ) -> None:
        self.name, self.ours, self.calls, self.runs_as = name, ours, calls, runs_as
        self._made = threading.local()
        their_own = inspect.signature(theirs).parameters
        known = inspect.signature(ours).parameters
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positions = [each.name for each in their_own.values() if each.kind in by_position]
        optional = {each.name: each.default for each in their_own.values() if each.default is not each.empty}
        # An option that is new there may be given here as long as it says nothing; a default that differs
        # is said.
        self._not_ours = {key: value for key, value in optional.items() if key not in known}
        self._defaults = {
            key: value for key, value in optional.items() if key in known and value != known[key].default
        }

    def accepts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, str | None]:
        """Whether `ours` takes the call, and if not, its sentence."""
        try:
            made, error = self.ours(**self._named(args, kwargs)), None
        except REFUSALS as refusal:
            reason = str(refusal) or type(refusal).__name__
            self.calls.add(self.name, reason)
            return False, reason
        except Exception as failure:
            made, error = None, failure
        self._made.call = (args, kwargs, made, error)
        return True, None

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        call, self._made.call = getattr(self._made, "call", None), None
        if call is None or not _same(call[0], args) or not _same_named(call[1], kwargs):
            made: object = self.ours(**self._named(args, kwargs))
        elif call[3] is not None:
            raise call[3]
        else:
            made = call[2]
        self.calls.add(self.name, self.runs_as)
        return made

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positions):
            raise TypeError(
                f"{self.name}() takes {len(self._positions)} positional arguments but {len(args)} were given"
            )
        named = dict(zip(self._positions, args, strict=False))
        if twice := named.keys() & kwargs.keys():
            raise TypeError(f"{self.name}() got multiple values for argument {min(twice)!r}")
        named.update(kwargs)
        for key, value in self._not_ours.items():
            if key in named and named[key] is value:
                del named[key]
        for key, value in self._defaults.items():
            named.setdefault(key, value)
        return named


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _same_named(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


def around(
    theirs: Callable[..., Any], substitute: Substitute, enabled: Callable[[], bool]
) -> Callable[..., Any]:
    """`theirs`, but for the calls that the substitute takes."""

    # Not the attributes that torch.compiler.disable leaves: PyTorch before 2.11 follows them to `theirs`.
    @functools.wraps(theirs, updated=())
    def either(*args: Any, **kwargs: Any) -> object:
        if enabled() and substitute.accepts(args, kwargs)[0]:
            return substitute.run(args, kwargs)
        return theirs(*args, **kwargs)

    return either


def rebind(pairs: Sequence[tuple[object, object]]) -> None:
    """Puts the second of each pair in the place of the first wherever an imported module has it, under
    whatever name."""
    places = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in places:
                setattr(module, name, places[id(value)])
