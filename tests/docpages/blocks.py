"""Pages, their fenced blocks, and the code within their sentences."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
SHELLS = ("sh", "bash", "console")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: its path below the repository's root.
        line: the line of its opening fence, from 1.
        language: the word after the fence; empty if there is none.
        text: its lines without the fences and their indent.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@functools.cache
def pages() -> tuple[str, ...]:
    """Every page that a user or a contributor reads; decisions and the changelog are history."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("helm/*/README.md"),
        *ROOT.glob("e2e/**/README.md"),
        *(ROOT / name / "README.md" for name in ("bench", "kernels")),
    ]
    names = sorted(page.relative_to(ROOT).as_posix() for page in found)
    return tuple(n for n in names if n != "CHANGELOG.md" and not n.startswith("docs/decisions/"))


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in FENCED.finditer(text):
        indent, language, body = match.groups()
        lines = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        yield Block(page, text.count("\n", 0, match.start()) + 1, language.strip(), lines)


def spans(page: str) -> Iterator[str]:
    """The code within sentences, on one line each."""
    for match in SPAN.finditer(FENCED.sub("", (ROOT / page).read_text())):
        yield " ".join(match[1].split())
