# SPDX-License-Identifier: Apache-2.0
"""What the operators' arguments are called in the function that a user has called."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Of calls with dense states, with a `state_pool`, and of those whose pool is `state`.
OF_DENSE = {"o": "out"}
POOL = {"initial_state": "state_pool", "final_state": "state_pool", **OF_DENSE}
STATE = {"initial_state": "state", "final_state": "state", **OF_DENSE}

_ARGUMENT = re.compile(r"(?:\w+: )?(\w+)")


def named(error: Exception, names: Mapping[str, str]) -> Exception:
    """An operator's error, which begins with the name of an argument, with the name that is the user's."""
    text = str(error)
    found = _ARGUMENT.match(text)
    if found is None or found[1] not in names:
        return error
    return type(error)(text[: found.start(1)] + names[found[1]] + text[found.end(1) :])
