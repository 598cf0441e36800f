"""Fails on a retired term in tracked text. The table and its format: retired_terms.txt.

Records of the past keep their words: the changelog, decisions, recorded runs and pod templates of
old revisions.
"""

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = "tools/retired_terms.txt"
WORD = re.compile(r"\w+")
RECORDS = (
    TABLE,
    "CHANGELOG.md",
    "docs/decisions/*",
    "bench/results/*",
    "e2e/recorded/*",
    "tests/contracts/templates/*",
    "requirements/*",
    "*.sum",
    "*.svg",
)


class Term(NamedTuple):
    """One retired term, and the files in which it must not occur."""

    pattern: str
    replacement: str
    literal: str = ""
    only: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the term is retired in the file `name`."""
        inside = not self.only or any(fnmatch.fnmatch(name, glob) for glob in self.only)
        return inside and not any(fnmatch.fnmatch(name, glob) for glob in self.allowed)


def read(table: str) -> list[Term]:
    """The terms of a table; raises ValueError for a line that has no replacement."""
    terms = []
    for line in table.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        term, arrow, rest = line.partition(" => ")
        if not arrow:
            raise ValueError(f"no ` => ` in {line!r}")
        rest, _, allowed = rest.partition(" | allowed ")
        replacement, _, only = rest.partition(" | only ")
        term = term.strip()
        literal = "" if term.startswith("re:") else term
        pattern = rf"(?<![\w-]){re.escape(term)}(?!\w)" if literal else term[3:]
        globs = tuple(only.split()), tuple(allowed.split())
        terms.append(Term(pattern, replacement.strip(), literal, *globs))
    return terms


def matches(terms: list[Term], files: dict[str, str]) -> Iterator[str]:
    """One line of report for each retired term in each line of `files` (name to text)."""
    compiled = [(term, re.compile(term.pattern)) for term in terms]
    for name, text in files.items():
        words = set(WORD.findall(text))
        for term, pattern in compiled:
            if _may_contain(text, words, term) and pattern.search(text) and term.covers(name):
                for number, line in enumerate(text.splitlines(), 1):
                    if found := pattern.search(line):
                        yield f"{name}:{number}: {found[0]} is now {term.replacement}"


def _may_contain(text: str, words: set[str], term: Term) -> bool:
    """A cheap test before the regular expression: most terms are words, and in few files."""
    if WORD.fullmatch(term.literal):
        return term.literal in words
    return term.literal in text


def tracked() -> dict[str, str]:
    """Name to text of every tracked text file that is not a record."""
    files = {}
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = Path(name)
        if path.is_file() and not any(fnmatch.fnmatch(name, glob) for glob in RECORDS):
            try:
                files[name] = path.read_text()
            except UnicodeDecodeError:
                continue
    return files


def main() -> int:
    """Report every match; returns the exit status."""
    found = list(matches(read(Path(TABLE).read_text()), tracked()))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
