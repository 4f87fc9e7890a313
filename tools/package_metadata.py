# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml says of the package that depends on where the project lives: `repository-code` of
CITATION.cff. Without one there are no addresses, and README.md stays as it is.

With one the package has its addresses, and README.md is shown with links and pictures of that repository, at
the tag of the version: a page of an index has no files beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# In a checkout or a source distribution, where a build runs.
ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    return re.search(r"project\(cula VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def repository() -> str | None:
    found = re.search(
        r'^repository-code: "?(https://[^"\s]+?)/?"?$', (ROOT / "CITATION.cff").read_text(), re.M
    )
    return found[1] if found else None


def urls(address: str) -> dict[str, str]:
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/v{version()}/docs/guide/README.md",
        "Changelog": f"{address}/blob/v{version()}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute(markdown: str, address: str) -> str:
    """With links and pictures that lead into the repository. Those that lead elsewhere stay."""

    def target(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/v{version()}/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)", target, markdown)


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> str | dict[str, str]:
    """What scikit-build-core asks for."""
    if settings:
        raise RuntimeError(f"package_metadata takes no settings, got {', '.join(settings)}")
    address = repository()
    if field == "urls":
        return urls(address) if address else {}
    if field == "readme":
        text = (ROOT / "README.md").read_text()
        return {"content-type": "text/markdown", "text": absolute(text, address) if address else text}
    raise RuntimeError(f"package_metadata knows urls and readme, not {field}")
