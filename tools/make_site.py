# SPDX-License-Identifier: Apache-2.0
"""make_site.py: the documentation as a site, in build-site/html.

The pages are the Markdown files of the repository, in folders as theirs, so that their links lead on; sources
that they link to, which become pages too; and one page for each public module of the package, from its
docstrings. They are gathered in build-site/pages, and Sphinx (tools/site/conf.py) makes the site, strictly: a
warning ends it. Links of the finished pages are checked once more, those in docstrings and to pictures too.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from check_links import LINK

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build-site"
PAGES, HTML = SITE / "pages", SITE / "html"
PACKAGE = ROOT / "python" / "cula"
HOME = "index.md"

# No part of the interface: what the drop-ins are made of, and programs.
LEFT_OUT = re.compile(r"cula\.(bench|ops)\b")
LANGUAGES = {".cc": "cpp", ".h": "cpp", ".cu": "cpp", ".cuh": "cpp", ".py": "python", ".sh": "bash"}
PICTURES = (".png", ".svg")

# Groups of modules, by the first that each holds; those of a package follow it.
GROUPS = {"cula": "The package", "cula.dist": "Several processes", "cula.integrations": "Adapters"}


def tracked(*patterns: str) -> list[str]:
    """The files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    return sorted(set(subprocess.check_output(command, cwd=ROOT, text=True).splitlines()))


def gather() -> None:
    """The Markdown files, and what they link to."""
    shutil.rmtree(SITE, ignore_errors=True)
    for name in tracked("*.md"):
        if not name.startswith((".", "hub/")):  # the latter are pages of another place
            write(HOME if name == "README.md" else name, rewritten(name))


def write(name: str, text: str) -> None:
    path = PAGES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def rewritten(name: str) -> str:
    """The page with links that a site can follow. Code blocks stay as they are."""
    folder, text = (ROOT / name).parent, (ROOT / name).read_text()
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda link: followed(folder, link), part)
        for part in parts
    )


def followed(folder: Path, link: re.Match[str]) -> str:
    path = link["path"]
    if "://" in path or path.startswith("mailto:") or not path:
        return link[0]
    target = (folder / path).resolve()
    name = str(target.relative_to(ROOT))
    if target.is_dir():
        index = f"{path.rstrip('/')}/README.md"
        return link[0].replace(f"({path}", f"({index}") if (folder / index).exists() else link["words"]
    if name == "README.md":
        return link[0].replace(f"({path}", f"({path.removesuffix(name)}{HOME}")
    if target.suffix == ".md":
        return link[0]
    if target.suffix in PICTURES:
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, PAGES / name)
        return link[0]
    language = LANGUAGES.get(target.suffix, "text")
    write(f"{name}.md", f"---\norphan: true\n---\n\n# {name}\n\n````{language}\n{target.read_text()}````\n")
    return link[0].replace(f"({path}", f"({path}.md")


def modules() -> dict[str, Path]:
    """The public modules of the package by their dotted names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["cula", *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts).removesuffix(".__init__")
        if not re.search(r"\._", name) and not LEFT_OUT.match(name) and not stood_for(path):
            found[name] = path
    return found


def stood_for(path: Path) -> bool:
    """Whether the module's package names functions of its modules, and none of the modules."""
    index = path.parent / "__init__.py"
    beside = {each.stem for each in path.parent.glob("*.py")}
    return path.name != index.name and not beside & set(named(index))


def named(path: Path) -> list[str]:
    """What `__all__` of a file names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def reference() -> list[str]:
    """Writes a page for each module; their names."""
    written: list[str] = []
    level1 = named(PACKAGE / "api.py")
    for name, path in modules().items():
        members = None  # a module's are its own functions
        if path.name == "__init__.py":
            beside = {each.stem for each in path.parent.iterdir()}
            # Those of Level 1 have a page of their own.
            elsewhere = beside | set(level1 if name == "cula" else ())
            members = [each for each in named(path) if each not in elsewhere]
        of = "" if members is None else f" {', '.join(members)}"
        directive = f"```{{eval-rst}}\n.. automodule:: {name}\n   :members:{of}\n```"
        write(f"reference/{name}.md", f"# {name}\n\n{directive}\n")
        written.append(name)
    return written


def listed(index: str) -> list[str]:
    """The pages that the table of an index names, in its order."""
    names = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\)", (ROOT / index).read_text(), re.MULTILINE)
    return [f"{Path(index).parent}/{name}" for name in names]


def contents(names: list[str]) -> str:
    """What the first page leads to, as tables of contents of the side bar."""
    design = [name for name in tracked("docs/design/*.md") if not name.endswith("architecture.md")]
    guide = listed("docs/guide/README.md")
    reference: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for name in names:
        of = max((each for each in GROUPS if f"{name}.".startswith(f"{each}.")), key=len)
        reference[GROUPS[of]].append(f"reference/{name}.md")
    groups = {
        "Guide": ["docs/guide/README.md", *guide],
        "Contract": ["docs/api.md", "ALGORITHM.md"],
        **reference,
        "Figures": ["docs/benchmarks.md", "docs/distributed.md"],
        "Design": ["docs/design/architecture.md", *design],
        "Tests": ["docs/gpu-tests.md", "docs/fla-tests.md", "docs/fuzzing.md", *tracked("tests/**README.md")],
        "Project": [
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "docs/releasing.md",
            "SECURITY.md",
            "docs/log/README.md",
        ],
    }
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in groups.items()
    )


class Links(HTMLParser):
    """The anchors of a page, and where its links and pictures lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for key, value in attributes:
            if key in ("id", "name") and value:
                self.anchors.add(value)
            elif key in ("href", "src") and value is not None:
                self.targets.append(value)


def broken(folder: Path) -> Iterator[str]:
    """Relative links of a folder of pages that lead to no file, or to no anchor of one."""
    pages = {path.resolve(): Links(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for target in page.targets:
            url, _, anchor = target.partition("#")
            url = unquote(url.partition("?")[0])
            if re.match(r"[a-z]+:|//", url):
                continue
            there = (path.parent / url).resolve() if url else path
            there = there / "index.html" if there.is_dir() else there
            known = there.exists() and (there not in pages or unquote(anchor) in pages[there].anchors)
            if not known and path.name != "404.html":
                yield f"{path.relative_to(folder.resolve())}: {target}"


def main() -> None:
    gather()
    home = PAGES / HOME
    home.write_text(home.read_text() + contents(reference()))
    log = PAGES / "docs" / "log" / "README.md"
    notes = "\n".join(path.stem for path in sorted(log.parent.glob("*.md")) if path != log)
    log.write_text(f"{log.read_text()}\n```{{toctree}}\n:hidden:\n\n{notes}\n```\n")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["--jobs", "auto"]
    command += ["--conf-dir", str(ROOT / "tools" / "site"), "--doctree-dir", str(SITE / "doctrees")]
    paths = [str(ROOT / "tools" / "site"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if subprocess.run([*command, str(PAGES), str(HTML)], env=environment, check=False).returncode:
        raise SystemExit("make_site: Sphinx found something, see above")
    if wrong := list(broken(HTML)):
        raise SystemExit("make_site: links that lead nowhere\n  " + "\n  ".join(wrong))
    print(f"site: {sum(1 for _ in HTML.rglob('*.html'))} pages, {HTML / 'index.html'}")


if __name__ == "__main__":
    main()
