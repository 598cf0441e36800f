"""Writes the outputs of offline commands into the pages that show them.

tools/docs_outputs.py            runs each command that a page shows, and writes its output
tools/docs_outputs.py --check    fails if a page shows another output

A page shows a command and its output as a block whose first line is `$ vlm ...`. `...` alone on a
line is text that the page leaves out: the lines around it are found again by their first and last
words. Revisions are digests of pod templates; a page shows each as 1a2b3c4d.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SHOWN = re.compile(r"^```\n\$ (vlm [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = "..."
_REVISION = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8}\b")


class Shown(NamedTuple):
    """A command on a page, and the output that the page shows."""

    page: Path
    command: str
    output: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.command}"


class LostError(Exception):
    """A line that the page shows is not in the output any more; edit the block by hand."""


def shown(root: Path = ROOT) -> Iterator[Shown]:
    """Every command with an output, on every page of docs/ and examples/."""
    for page in sorted([*root.glob("docs/*.md"), *root.glob("examples/*/README.md")]):
        for command, output in _SHOWN.findall(page.read_text()):
            yield Shown(page, command, output)


def plain(output: str) -> str:
    """An output as a page shows it: no spaces at the ends of lines, no digests."""
    lines = (line.rstrip() for line in output.splitlines())
    return _REVISION.sub("1a2b3c4d", "\n".join(lines) + "\n")


def updated(before: str, output: str) -> str:
    """What a page that shows `before` shows of `output`.

    Raises:
        LostError: the first or last line of a part is missing.
    """
    lines, at, found = output.splitlines(), 0, list[str]()
    parts = _parts(before)
    for i, part in enumerate(parts):
        if not part:
            found += [_LEFT_OUT] if i else []
            continue
        if i == 0:
            start = 0
        else:
            found += [_LEFT_OUT]
            start = _line(part[0], lines, at)
        at = len(lines) if i == len(parts) - 1 else _line(part[-1], lines, start) + 1
        found += lines[start:at]
    return "\n".join(found) + "\n"


def _parts(text: str) -> list[list[str]]:
    """The lines between those that are left out; empty at an end that is left out."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == _LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _line(text: str, lines: list[str], at: int) -> int:
    """The number of the line, or of the one line that begins with the same words."""
    for wanted in (text, " ".join(text.split()[:2])):
        for number in range(at, len(lines)):
            if lines[number] == wanted or lines[number].strip().startswith(wanted):
                return number
    raise LostError(f"the output has no line {text!r} any more")


def main(arguments: list[str]) -> int:
    """Write or check every page; returns the exit status."""
    stale = 0
    for one in shown():
        words = [str(Path(sys.executable).parent / "vlm"), *shlex.split(one.command)[1:]]
        done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
        new = updated(one.output, plain(done.stdout))
        if new != one.output:
            stale += 1
            print(f"{'stale' if '--check' in arguments else 'written'}: {one}")
            if "--check" not in arguments:
                text = one.page.read_text()
                old = f"$ {one.command}\n{one.output}```"
                one.page.write_text(text.replace(old, f"$ {one.command}\n{new}```"))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
