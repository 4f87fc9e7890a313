# SPDX-License-Identifier: Apache-2.0
"""Links of the description that a package index shows."""

from __future__ import annotations

import pytest

import package_metadata

ADDRESS = "https://example.org/cula"
VERSION = f"v{package_metadata.version()}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![a plot](bench/x.png)", f"![a plot]({ADDRESS}/raw/{VERSION}/bench/x.png)"),
        ("[a page](docs/api.md#numbers)", f"[a page]({ADDRESS}/blob/{VERSION}/docs/api.md#numbers)"),
        ("[elsewhere](https://example.com/x)", "[elsewhere](https://example.com/x)"),
        ("[here](#map)", "[here](#map)"),
    ],
)
def test_links_are_absolute(text, shown):
    assert package_metadata.absolute(f"See {text}.", ADDRESS) == f"See {shown}."


def test_the_readme_keeps_no_relative_link():
    text = package_metadata.absolute((package_metadata.ROOT / "README.md").read_text(), ADDRESS)
    assert f"({ADDRESS}/raw/{VERSION}/bench/results/" in text
    assert "](docs/" not in text
    assert "](bench/" not in text


@pytest.mark.parametrize(
    ("line", "address"),
    [
        (f'repository-code: "{ADDRESS}/"', ADDRESS),
        (f"repository-code: {ADDRESS}", ADDRESS),
        ("title: cula", None),
    ],
)
def test_the_address_is_that_of_the_citation(monkeypatch, tmp_path, line, address):
    (tmp_path / "CITATION.cff").write_text(f"type: software\n{line}\n")
    (tmp_path / "CMakeLists.txt").write_text("project(cula VERSION 9.9 LANGUAGES CXX)\n")
    (tmp_path / "README.md").write_text("[a page](docs/api.md)\n")
    monkeypatch.setattr(package_metadata, "ROOT", tmp_path)
    urls = package_metadata.dynamic_metadata("urls", {})
    readme = package_metadata.dynamic_metadata("readme", {})
    assert urls.get("Homepage") == address
    assert readme["text"] == f"[a page]({f'{address}/blob/v9.9/' if address else ''}docs/api.md)\n"


def test_settings_are_refused():
    with pytest.raises(RuntimeError, match="takes no settings, got input"):
        package_metadata.dynamic_metadata("urls", {"input": "README.md"})
