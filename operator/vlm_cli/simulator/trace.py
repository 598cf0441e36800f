"""Traces: requests with arrival times, generated or read from a file of JSON lines.

    {"at": 12.5, "text_tokens": 300, "output_tokens": 120, "patches": [2304], "cached_tokens": 0}

`at` is in seconds from the start of the trace. `patches` has one number per image. `cached_tokens`
is the length of the prompt's prefix in the prefix cache. Both are optional.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

_FIELDS = {"at", "text_tokens", "output_tokens", "patches", "cached_tokens"}


class TraceError(ValueError):
    """A line of a recorded trace is invalid; the message names the line, the field and the fix."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request: its arrival and its sizes.

    Attributes:
        at: arrival, in seconds since the start of the trace.
        text_tokens: prompt tokens without visual tokens.
        output_tokens: tokens of the answer, at least 1.
        patches: number of patches of each image, after resizing.
        cached_tokens: length of the prompt's prefix in the prefix cache.
    """

    at: float
    text_tokens: int
    output_tokens: int
    patches: tuple[int, ...] = ()
    cached_tokens: int = 0

    @property
    def modality(self) -> str:
        """Modality as in metrics: `image` or `text`."""
        return "image" if self.patches else "text"


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, over `seconds`."""

    name: str
    seconds: float
    requests: tuple[Request, ...]


def read_trace(name: str, lines: Iterable[str]) -> Trace:
    """Read a recorded trace; it ends with the minute of its last request.

    Raises:
        TraceError: a line is invalid, or there is none.
    """
    requests = [
        _request(line, number) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not requests:
        raise TraceError(f"{name} has no request: write one JSON object per line")
    requests.sort(key=lambda request: request.at)
    return Trace(name, 60.0 * (math.floor(requests[-1].at / 60) + 1), tuple(requests))


def write_trace(trace: Trace) -> Iterable[str]:
    """Yield the lines that `read_trace` reads."""
    for request in trace.requests:
        yield json.dumps(dataclasses.asdict(request))


def _request(line: str, number: int) -> Request:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise TraceError(f"line {number} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"line {number} is not an object: write {{...}}")
    unknown = sorted(set(value) - _FIELDS)
    if unknown:
        raise TraceError(
            f"line {number}: {unknown[0]} is not a field: use one of {', '.join(sorted(_FIELDS))}"
        )
    at = value.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
        raise TraceError(f"line {number}: at must be seconds from the start, at least 0")
    patches = value.get("patches", [])
    if not isinstance(patches, list):
        raise TraceError(f"line {number}: patches must be a list with one number per image")
    return Request(
        at=float(at),
        text_tokens=_count(value.get("text_tokens"), "text_tokens", number, minimum=1),
        output_tokens=_count(value.get("output_tokens"), "output_tokens", number, minimum=1),
        patches=tuple(_count(item, "patches", number, minimum=1) for item in patches),
        cached_tokens=_count(value.get("cached_tokens", 0), "cached_tokens", number, minimum=0),
    )


def _count(value: Any, field: str, number: int, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise TraceError(f"line {number}: {field} must be an integer of at least {minimum}")
    return value
