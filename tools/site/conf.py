# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration of the site that tools/make_site.py makes.

Formulas become MathML, which browsers draw without a script.
"""

from __future__ import annotations

from docstrings import restructured
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import cula

project = "cula"
author = "the cula developers"
version = release = cula.build_info().version
html_title = f"cula {version}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "text"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style = "default"
pygments_dark_style = "monokai"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"


def on_docstring(
    _app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    lines[:] = restructured("\n".join(lines)).splitlines()


def skips(_app: Sphinx, _what: str, _name: str, obj: object, _skip: bool, _options: object) -> bool | None:
    """The fields of named tuples, of which Python says nothing but their number."""
    text = getattr(obj, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def _formula(translator: HTML5Translator, node: nodes.math | nodes.math_block, display: str) -> None:
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(lambda self, node: _formula(self, node, "inline"), None),
        block_renderers=(lambda self, node: _formula(self, node, "block"), None),
    )
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-skip-member", skips)
