"""The site of the documentation: built as `make docs` builds it, and what its pages contain."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from site_pages import menu, with_links

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    [line] = re.findall(r"sphinx-build (.*)", (ROOT / "Makefile").read_text())
    line = line.replace("build/site.doctrees", str(folder / "doctrees"))
    words = [sys.executable, "-m", "sphinx", *line.split()[:-1], str(folder / "html")]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder / "html"


def test_the_menu_has_each_section_of_the_index(site: Path):
    front = (site / "docs/README/index.html").read_text()
    captions = re.findall(r'class="caption-text">([^<]+)<', front)
    sections = re.findall(r"^## (.*)$", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    assert [*dict.fromkeys(captions)] == sections


def test_every_runbook_and_decision_is_a_page(site: Path):
    for folder in ("docs/runbooks", "docs/decisions"):
        for page in (ROOT / folder).glob("*.md"):
            assert (site / folder / page.stem / "index.html").exists()


def test_a_broken_link_and_a_page_outside_the_index_fail(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/README.md").write_text("# Index\n\n## Use\n\n[gone](gone.md)\n")
    (tmp_path / "docs/alone.md").write_text("# Alone\n")
    words = ["-q", "-W", "--keep-going", "-b", "dirhtml", "-c", str(ROOT / "tools/docs_site")]
    command = [sys.executable, "-m", "sphinx", *words, str(tmp_path), str(tmp_path / "html")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode != 0
    assert "gone.md" in built.stderr
    assert "alone.md: WARNING: document isn't included in any toctree" in built.stderr


def test_links_to_folders_and_source_files_are_replaced():
    page = ROOT / "docs/install.md"
    text = (
        "[a](../examples/quickstart) [b](../Makefile) [c](plan.md#x) [d](https://x.y) ![e](i.png)"
    )
    found = "[a](../examples/quickstart/README.md) b [c](plan.md#x) [d](https://x.y) ![e](i.png)"
    assert with_links(page, text) == found
    code = "```sh\n[b](../Makefile)\n```"
    assert with_links(page, code) == code


def test_a_folder_in_the_index_stands_for_its_pages():
    assert "/docs/runbooks/TriptychKVSaturated" in menu("## Operate\n\n| [r](runbooks) | x |\n")
