# SPDX-License-Identifier: Apache-2.0
"""The package's docstrings, plain text with Markdown's backticks, as reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterator

PAGE = re.compile(r"\b(docs/[\w/-]+)\.md\b")
# One or more names, and what is said of them.
ENTRY = re.compile(r"(?P<names>\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*): (?P<text>.*)")


def restructured(docstring: str) -> str:
    """Paragraphs of arguments, one `name: text` after the other, become lists, and indented ones code."""
    return "\n\n".join(map(_paragraph, re.split(r"\n{2,}", docstring.strip("\n"))))


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return f".. code-block:: python\n\n{text}"
    lines = _plain(text).splitlines()
    first = ENTRY.fullmatch(lines[0]) if lines else None
    if first is None:
        return "\n".join(lines)
    entries = list(_entries(lines))
    if len(entries) == 1 and first["names"][0].isupper():  # a sentence with a heading
        return "\n".join([f"**{first['names']}**: {first['text']}", *(line.strip() for line in lines[1:])])
    return "\n".join(entries)


def _plain(text: str) -> str:
    """Code between single backticks as between double ones; stars outside of code are stars; a page of the
    documentation is a link to it."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"`{part}`" if part.startswith("`") else PAGE.sub(r":doc:`\g<0> </\1>`", part.replace("*", r"\*"))
        for part in parts
    )


def _entries(lines: list[str]) -> Iterator[str]:
    """Items of a list, each with the lines that go on with it."""
    item: list[str] = []
    for line in lines:
        found = ENTRY.fullmatch(line.replace(r"\*", "*", 2) if line.startswith(r"\*") else line)
        if found is None:
            item.append(f"  {line.strip()}")
            continue
        if item:
            yield "\n".join(item)
        names = ", ".join(f"``{name}``" for name in found["names"].split(", "))
        item = [f"- {names}: {found['text']}"]
    yield "\n".join(item)
