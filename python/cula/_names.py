# SPDX-License-Identifier: Apache-2.0
"""The names of arguments in errors: an operator's error has the operator's name of an argument, and the
function that was called may have another one."""

from __future__ import annotations

import re
from collections.abc import Mapping

# From the operators' names to those of calls with dense states, with a `state_pool`, and with a pool that is
# called `state`.
OF_DENSE = {"o": "out"}
POOL = {"initial_state": "state_pool", "final_state": "state_pool", **OF_DENSE}
STATE = {"initial_state": "state", "final_state": "state", **OF_DENSE}

# "decode: initial_state must have shape ..": the first word behind the pass is the argument.
_ARGUMENT = re.compile(r"(?:\w+: )?(\w+)")


def _argument(error: Exception) -> re.Match[str] | None:
    return _ARGUMENT.match(str(error)) if type(error) in (TypeError, ValueError) else None


def is_of(error: Exception, argument: str) -> bool:
    """Whether the error is about this argument of an operator."""
    found = _argument(error)
    return found is not None and found[1] == argument


def named(error: Exception, names: Mapping[str, str]) -> Exception:
    """The same error with the argument that it is about as `names` calls it; the error itself where that
    argument is not among them."""
    found = _argument(error)
    if found is None or found[1] not in names:
        return error
    text = found.string
    return type(error)(text[: found.start(1)] + names[found[1]] + text[found.end(1) :])
