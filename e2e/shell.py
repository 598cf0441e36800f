"""A shell that a user types a page's commands into, and what the page shows of their output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from docpages import shell
from docpages.blocks import ROOT

LEFT_OUT = "…"  # text that a page leaves out
FULL = "<!-- full -->"  # before a block whose commands take long
END = "--- the command has ended:"
_CONSOLE = re.compile(
    rf"^(?P<full>{FULL}\n)?```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
# What differs between two runs: names of pods, revisions, times and other numbers.
_VARIES = (
    (re.compile(r"-[0-9a-f]{8,10}-[a-z0-9]{5}\b"), "-POD"),
    (re.compile(r"\b(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,32}\b"), "ID"),
    (re.compile(r"\b\d[\d.,:]*(?:m\d+s|s|m|h)?\b"), "N"),
    (re.compile(r"[─-]{3,}| +"), " "),
)


class Typed:
    """One bash; its variables and background jobs last until it ends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, command: str) -> tuple[str, int]:
        """What a command prints, errors included, and its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\necho '{END}' $?\n".encode())
        await self._process.stdin.drain()
        said = ""
        async for line in self._process.stdout:
            text = line.decode()
            before, end, status = text.partition(END)
            said += before if end else text
            if end:
                print(f"$ {command}\n{said}")
                return said, int(status)
        raise AssertionError(f"the shell ended in {command!r}:\n{said}")


@contextlib.asynccontextmanager
async def terminal(**environment: str) -> AsyncIterator[Typed]:
    """A terminal in the repository; its jobs end with it."""
    process = await asyncio.create_subprocess_exec(
        "bash",
        "--norc",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160", **environment},  # noqa: TID251
        cwd=ROOT,
        start_new_session=True,
        limit=1 << 20,
    )
    try:
        yield Typed(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 60)


def commands(page: Path, *, full: bool) -> Iterable[tuple[str, list[str]]]:
    """The commands of a page's console blocks, each with the lines that the page shows."""
    for block in _CONSOLE.finditer(page.read_text()):
        if full or not block["full"]:
            yield from shell.typed(block["text"])


def missing(shown: Sequence[str], printed: str) -> list[str]:
    """The lines that a page shows and a command did not print, but for what varies."""
    said = [_plain(line) for line in printed.splitlines()]
    return [
        line
        for line in shown
        if line.strip() != LEFT_OUT and not any(_pattern(line).fullmatch(one) for one in said)
    ]


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(_plain(part)) for part in line.split(LEFT_OUT)))


def _plain(line: str) -> str:
    for pattern, name in _VARIES:
        line = pattern.sub(name, line)
    return line.strip()
