"""The documentation names what exists: links, files, constants."""

import dataclasses
import re
from pathlib import Path

import pytest

from vlm_operator.api.policy import Autoscaling, Slo
from vlm_operator.api.scaling import ScaleDown, ScaleToZero, ScaleUp, Targets
from vlm_operator.autoscale.constants import CONSTANTS

ROOT = Path(__file__).parents[2]
PARTS = ("docs", "examples", "bench", "helm", "kernels")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for part in PARTS for page in ROOT.glob(f"{part}/**/*.md"))]
)
MAX_LINE = 130  # text is wrapped at 120; a rename may make a line longer
WIDE = ("api.md",)  # generated
PROSE = [page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if page.name not in WIDE]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)|!\[[^\]]*\]\(([^)\s]+)\)")
ANCHOR = re.compile(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)")
WALK_BUDGETS = {"docs/request.md": 2750, "docs/vlmservice.md": 1720}
STEP = re.compile(r"\]\(([^)#]+\.py)\)")


def _links(page: Path) -> list[str]:
    found = [first or second for first, second in LINK.findall(page.read_text())]
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_names_a_file(page):
    missing = [link for link in _links(page) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_anchor_names_a_heading(page):
    links = [
        (page.parent / link if link else page, anchor)
        for link, anchor in ANCHOR.findall(page.read_text())
    ]
    missing = [anchor for target, anchor in links if anchor not in _anchors(target)]
    assert not missing


@pytest.mark.parametrize("page", PROSE, ids=lambda p: str(p.relative_to(ROOT)))
def test_prose_has_short_lines(page):
    parts = page.read_text().split("\n```")[::2]  # without code blocks
    lines = "".join(parts).splitlines()
    rows = ("|", "    ", "!")  # tables, indented code, images
    assert not [line for line in lines if len(line) > MAX_LINE and not line.startswith(rows)]


@pytest.mark.parametrize(("walk", "budget"), WALK_BUDGETS.items())
def test_a_walk_can_be_read_in_one_sitting(walk, budget):
    page = ROOT / walk
    files = {(page.parent / name).resolve() for name in STEP.findall(page.read_text())}
    assert len(files) >= 8, "a walk names the files of its steps"
    lines = {str(f.relative_to(ROOT)): f.read_text().count("\n") for f in files}
    assert sum(lines.values()) <= budget, lines


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("request.md", "worker/vlm_worker"),
        ("failures.md", "worker/vlm_worker"),
        ("vlmservice.md", "operator/vlm_operator"),
    ],
)
def test_paths_that_a_page_names_exist(name, part):
    named = re.findall(
        r"`([a-z_]+(?:/[a-z_]+)*/(?:[a-z_]+\.py)?)`", (ROOT / "docs" / name).read_text()
    )
    assert named
    roots = (ROOT, ROOT / part)
    assert not [one for one in named if not any((root / one).exists() for root in roots)]


def test_the_autoscaling_page_has_every_constant_of_a_manifest_and_its_default():
    page = (ROOT / "docs" / "autoscaling.md").read_text()
    table = page.partition("## The constants")[2].partition("\nA change")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    found: list[tuple[str, int]] = []
    for model in (Targets(), ScaleUp(), ScaleDown(), ScaleToZero()):
        found += [(name, value) for name, value in model.to_dict().items() if type(value) is int]
    found += [("windowSeconds", Slo().window_seconds)]
    found += [
        (name, value) for name, value in Autoscaling().to_dict().items() if type(value) is int
    ]
    assert len(found) <= 12
    for name, default in found:
        assert [row for row in rows if f"{name}`" in row and f" {default}" in row.split("|")[2]], (
            name
        )


def test_the_autoscaling_page_has_each_constant_of_the_method_that_it_names_and_its_value():
    page = (ROOT / "docs" / "autoscaling.md").read_text()
    table = page.partition("### Constants of the method")[2].partition("\nFor experiments")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE))
    constants = dataclasses.asdict(CONSTANTS)
    assert {name: float(value) for name, value in listed.items()} == {
        name: value for name, value in constants.items() if f"`{name}`" in page
    }


def test_decisions_are_numbered_without_gaps():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{i:04}" for i in range(1, len(pages) + 1)]
    titles = [page.read_text().split(". ", 1)[0] for page in pages]
    assert titles == [f"# {i}" for i in range(1, len(pages) + 1)]


def test_the_style_guide_names_files_that_exist():
    named = re.findall(
        r"`((?:operator|worker|docs|tests)/[\w/.]+)`", (ROOT / "AGENTS.md").read_text()
    )
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
