"""Sphinx builds the site from the Markdown files of the repository; `make docs`.

docs/README.md    the index: each `##` section with a table of links becomes a part of the menu
other pages       as they are; a page that the index does not name fails the build

The files stay readable on a forge, so they have no directives. A link to a file that is no page
goes to the source code at `TRIPTYCH_SOURCE_URL`, or loses its link if that is unset.
"""

import os
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from site_pages import INDEX, ROOT, menu, with_links

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE_URL = os.environ.get("TRIPTYCH_SOURCE_URL", "").rstrip("/")  # noqa: TID251 - Sphinx runs this

project = "Triptych"
version = release = PROJECT["version"]
author = copyright = "The Triptych authors"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = INDEX
include_patterns = [
    "*.md",
    "docs/**.md",
    "examples/**README.md",
    "helm/triptych/README.md",
    "kernels/README.md",
    "bench/**.md",
    "e2e/nodes/README.md",
]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"Triptych {version}"
html_copy_source = False
html_show_sphinx = False


def read(_: Sphinx, name: str, source: list[str]) -> None:
    text = source[0]
    source[0] = with_links(ROOT / f"{name}.md", text, SOURCE_URL)
    if name == INDEX:
        source[0] += "\n" + menu(text)


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
