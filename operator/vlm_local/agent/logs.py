"""Stores a container's output with a time for each line, and reads it for `kubectl logs`."""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)
READ_BYTES = 64 * 1024
LONGEST_LINE = 1024 * 1024  # long enough for a decision record, which is one line
FOLLOW_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """The requested part of a log: PodLogOptions."""

    follow: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since: datetime | None = None
    limit_bytes: int | None = None

    @classmethod
    def parse(cls, query: Mapping[str, str], *, now: datetime) -> "LogOptions":
        """Read the query of `/containerLogs`.

        Raises:
            ValueError: a number or a time cannot be parsed.
        """
        since = None
        if "sinceSeconds" in query:
            since = datetime.fromtimestamp(now.timestamp() - int(query["sinceSeconds"]), UTC)
        elif "sinceTime" in query:
            since = datetime.fromisoformat(query["sinceTime"])
        return cls(
            follow=query.get("follow") == "true",
            timestamps=query.get("timestamps") == "true",
            tail_lines=int(query["tailLines"]) if "tailLines" in query else None,
            since=since,
            limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
        )


class ContainerLog:
    """The output of one run of a container; only `pump` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ended = asyncio.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    async def pump(self, output: asyncio.StreamReader) -> None:
        """Write the output to the log until it ends; split long lines.

        If the disk is full, the log ends, but the output is still read: the container never blocks.
        """
        try:
            await self._write(output)
        except OSError as error:
            logger.warning("log truncated", extra={"path": self.path, "error": str(error)})
            while await output.read(READ_BYTES):
                pass
        self._ended.set()

    async def _write(self, output: asyncio.StreamReader) -> None:
        rest = b""
        with self.path.open("ab", buffering=0) as file:
            while piece := await output.read(READ_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) >= LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                now = _stamp()
                file.write(b"".join(b"%s %s\n" % (now, line) for line in lines))
            if rest:
                file.write(b"%s %s\n" % (_stamp(), rest))

    def last_lines(self, count: int) -> str:
        """Return the last lines, without times."""
        return "".join(_formatted(line, timestamps=False) for line in deque(self._lines(), count))

    async def read(self, options: LogOptions) -> AsyncIterator[bytes]:
        """Yield the requested lines; with `follow`, also new lines until the container ends."""
        remaining = options.limit_bytes
        async for line in self._selected(options):
            text = _formatted(line, timestamps=options.timestamps).encode()
            if remaining is not None:
                text, remaining = text[:remaining], remaining - len(text)
            yield text
            if remaining is not None and remaining <= 0:
                return

    async def _selected(self, options: LogOptions) -> AsyncIterator[bytes]:
        with self.path.open("rb") as file:
            lines: Iterable[bytes] = _since(file, options.since)
            if options.tail_lines is not None:
                lines = deque(lines, options.tail_lines)
            for line in lines:
                yield line
            ended = not options.follow
            while not ended:
                ended = self._ended.is_set()  # before the read, so that no last output is missed
                for line in file:
                    yield line
                if not ended:
                    await asyncio.sleep(FOLLOW_SECONDS)

    def _lines(self) -> Iterable[bytes]:
        with self.path.open("rb") as file:
            yield from file


def _since(lines: Iterable[bytes], moment: datetime | None) -> Iterable[bytes]:
    for line in lines:
        if moment is None or datetime.fromisoformat(line.split(b" ", 1)[0].decode()) >= moment:
            yield line


def _formatted(line: bytes, *, timestamps: bool) -> str:
    text = line if timestamps else line.split(b" ", 1)[1]
    return text.decode(errors="replace")


def _stamp() -> bytes:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z").encode()
