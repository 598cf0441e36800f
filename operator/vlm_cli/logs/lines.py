"""Parses, selects and orders lines of logs. Pure.

Workers and gateways write one JSON object per line with `level`, and the operator with `severity`.
Lines that are no JSON object have no level.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from vlm_operator.cluster import epoch_seconds

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+)([smhd])")


class LogLevel(enum.StrEnum):
    """Least severe first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


_LEVELS = {level.value: number for number, level in enumerate(LogLevel)} | {"warn": 2, "fatal": 4}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a container's log.

    Attributes:
        at: seconds since the epoch at which the container wrote it.
        source: pod, or pod/container.
    """

    at: float
    source: str
    text: str

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The JSON object of the line; empty if it is none."""
        if not self.text.startswith("{"):
            return {}
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def level(self) -> int | None:
        """Position in `LogLevel`; None if the line has no known level."""
        value = self.fields.get("level", self.fields.get("severity"))
        return _LEVELS.get(str(value).lower())


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which lines are shown.

    Attributes:
        request: only lines that contain this id of a request, which the gateway or a client chose.
        level: no lines with a known lower level.
    """

    request: str | None = None
    level: LogLevel | None = None

    def select(self, lines: Iterable[Line]) -> list[Line]:
        """Return the selected lines in order of time; lines of one source keep their order."""
        ordered = sorted(lines, key=lambda line: line.at)
        ids = _ids(self.request, ordered)
        return [line for line in ordered if self._has_level(line) and _has_any(ids, line)]

    def _has_level(self, line: Line) -> bool:
        return self.level is None or line.level is None or line.level >= _LEVELS[self.level]


def parse_line(raw: bytes, *, source: str, last: float) -> Line:
    """Split a line of the log endpoint into time and text.

    `last` is the time of a line without one, as kubelet writes for its own messages.
    """
    line = raw.decode(errors="replace")
    stamp, _, text = line.partition(" ")
    try:
        at = epoch_seconds(stamp)
    except ValueError:
        return Line(last, source, line)
    return Line(at, source, text)


def parse_duration(text: str) -> datetime.timedelta:
    """Read such as `45s`, `10m` or `1h30m`.

    Raises:
        ValueError: it has another form.
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration such as 45s, 10m or 1h30m")
    return datetime.timedelta(seconds=sum(int(number) * _UNITS[unit] for number, unit in parts))


def _ids(request: str | None, lines: Iterable[Line]) -> set[str]:
    """Return the request's id; if it is a client's, also the ids that gateways gave it."""
    if request is None:
        return set()
    chosen = (line.fields for line in lines if request in line.text)
    found = {str(item["request_id"]) for item in chosen if item.get("client_request_id") == request}
    return {request, *found}


def _has_any(ids: set[str], line: Line) -> bool:
    return not ids or any(one in line.text for one in ids)
