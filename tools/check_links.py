# SPDX-License-Identifier: Apache-2.0
"""Every relative link of the Markdown files leads to a file, and its anchor to a heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(path.read_text())
    }


def main() -> int:
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md")]
    broken, count = [], 0
    for path in paths:
        for link in LINK.finditer(CODE.sub("", path.read_text())):
            if "://" in link["path"] or link["path"].startswith("mailto:"):
                continue
            count += 1
            target = path.parent / link["path"] if link["path"] else path
            if not target.exists() or (link["anchor"] and link["anchor"] not in anchors(target)):
                broken.append(f"{path.relative_to(ROOT)}: {link[0]}")
    if broken:
        print("check_links: broken\n  " + "\n  ".join(broken), file=sys.stderr)
        return 1
    print(f"links: {count} in {len(paths)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
