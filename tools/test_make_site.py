# SPDX-License-Identifier: Apache-2.0
"""What make_site.py makes of pages and docstrings before Sphinx reads them, and which links it finds broken
afterwards."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import make_site
from check_links import LINK

sys.path.append(str(Path(make_site.__file__).parent / "site"))

from docstrings import restructured


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A repository of a few pages, without git."""
    for name, text in {
        "README.md": "# home\n\n[guide](docs/guide/README.md)\n",
        "docs/guide/README.md": "# guide\n\n| page |\n|---|\n| [b.md](b.md) |\n| [a.md](a.md) |\n",
        "examples/run.py": 'print("`")\n',
        "docs/plot.png": "a picture",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    monkeypatch.setattr(make_site, "PAGES", tmp_path / "build-site" / "pages")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[a page](docs/a.md#anchor)", "[a page](docs/a.md#anchor)"),
        ("[home](README.md#use)", "[home](index.md#use)"),
        ("[a folder](docs/guide/)", "[a folder](docs/guide/README.md)"),
        ("[a folder](docs/)", "a folder"),
        ("[`code`](examples/run.py)", "[`code`](examples/run.py.md)"),
        ("[away](https://example.org/x.py)", "[away](https://example.org/x.py)"),
        ("[here](#anchor)", "[here](#anchor)"),
        ("![a picture](docs/plot.png)", "![a picture](docs/plot.png)"),
    ],
)
def test_links_lead_on(tree, before, after):
    (tree / "page.md").write_text(f"{before}\n\n```\n{before}\n```\n")
    assert make_site.rewritten("page.md") == f"{after}\n\n```\n{before}\n```\n"


def test_a_source_becomes_a_page_and_a_picture_is_copied(tree):
    (tree / "page.md").write_text("[`code`](examples/run.py) ![a picture](docs/plot.png)")
    make_site.rewritten("page.md")
    assert '````python\nprint("`")\n````' in (make_site.PAGES / "examples" / "run.py.md").read_text()
    assert (make_site.PAGES / "docs" / "plot.png").read_text() == "a picture"


@pytest.mark.usefixtures("tree")
def test_the_order_of_the_guide_is_that_of_its_table():
    assert make_site.listed("docs/guide/README.md") == ["docs/guide/b.md", "docs/guide/a.md"]


def test_every_page_of_the_guide_is_in_its_table():
    folder = make_site.ROOT / "docs" / "guide"
    pages = {f"docs/guide/{path.name}" for path in folder.glob("*.md")} - {"docs/guide/README.md"}
    assert set(make_site.listed("docs/guide/README.md")) == pages


def test_the_public_modules():
    found = make_site.modules()
    assert {"cula", "cula.api", "cula.kda", "cula.dist", "cula.compat.vllm", "cula.integrations.fla"} <= set(
        found
    )
    private = {
        "cula._ops",
        "cula.integrations._fla_cpu",
        "cula.dist.lanes",
        "cula.bench.cpu",
        "cula.__main__",
    }
    assert not private & set(found)


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.html").write_text('<p id="here"></p><a href="#here"></a><a href="#gone"></a>')
    (tmp_path / "style.css").write_text("")
    (tmp_path / "index.html").write_text(
        '<link href="style.css?v=1"><a href="a/x.html#here"></a><a href="a/x.html#gone"></a>'
        '<img src="no.png"><a href="https://example.org"></a><a href="mailto:a@b.c"></a>'
    )
    assert sorted(make_site.broken(tmp_path)) == [
        "a/x.html: #gone",
        "index.html: a/x.html#gone",
        "index.html: no.png",
    ]


def test_docstrings():
    text = """What it does, in `code` and *args. docs/guide/a-b.md has more.

q, k: `[B, T]`, of one
    dtype.
**kwargs: nothing.

Errors: `ValueError` names
the argument.

    import cula
    cula.run()

g is the log decay: at most 0."""
    assert (
        restructured(text)
        == r"""What it does, in ``code`` and \*args. :doc:`docs/guide/a-b.md </docs/guide/a-b>` has more.

- ``q``, ``k``: ``[B, T]``, of one
  dtype.
- ``**kwargs``: nothing.

**Errors**: ``ValueError`` names
the argument.

.. code-block:: python

    import cula
    cula.run()

g is the log decay: at most 0."""
    )


def test_a_link_has_words_and_a_path():
    found = LINK.search("see [the words](a/b.md#c), please")
    assert found is not None
    assert (found["words"], found["path"], found["anchor"]) == ("the words", "a/b.md", "c")
    assert re.match(LINK, "[]()")
