# SPDX-License-Identifier: Apache-2.0
"""What an adapter was asked for, what it ran, and why it did not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

# A reason may name shapes, and a long run meets many: more than these go together.
MOST_REASONS = 1000
OTHERS = "other reasons"


class Calls(Mapping[tuple[str, str], int]):
    """Counts of calls by (function, what ran it), where the second is "cula", "PyTorch", or the sentence with
    which the call was left to the other project's own code. Prints as a table; safe to read and to clear at
    any time. `first` is called with each pair that is new."""

    def __init__(self, first: Callable[[str, str], None] | None = None) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._first = first
        self._lock = threading.Lock()

    def add(self, function: str, ran: str) -> None:
        key = function, ran
        with self._lock:
            if key not in self._counts and len(self._counts) >= MOST_REASONS:
                key = function, OTHERS
            count = self._counts[key] = self._counts.get(key, 0) + 1
        if count == 1 and self._first is not None:
            self._first(*key)

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()

    def __getitem__(self, key: tuple[str, str]) -> int:
        return self._counts[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        with self._lock:
            return iter(list(self._counts))

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        with self._lock:
            counts = sorted(self._counts.items())
        width = max((len(function) for (function, _), _ in counts), default=0)
        return "\n".join(f"{function:{width}}  {count:>6}  {ran}" for (function, ran), count in counts)
