"""Which request a task works for, for its log lines, and the spans of its call.

`vlm_worker.tracing` exports the spans. It is imported only if the environment names a collector.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

from vlm_worker.types import RequestKey, StageSpan

REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""The request that the current task works for; "" = none. Every log line has it."""

CALL: Final[ContextVar[WorkerCall | None]] = ContextVar("call", default=None)
"""The call of a request that the current task answers; None = none."""


@dataclasses.dataclass(slots=True)
class WorkerCall:
    """A call of a request to a worker.

    Attributes:
        began: arrival, in seconds of the monotonic clock.
        spans: the latest report of each stage, in seconds from the arrival.
    """

    key: RequestKey
    began: float = dataclasses.field(default_factory=time.monotonic)
    spans: dict[tuple[str, int, float], StageSpan] = dataclasses.field(default_factory=dict)

    @classmethod
    def begin(cls, key: RequestKey) -> WorkerCall:
        """Let the current task work for the request of `key` from now on."""
        call = cls(key)
        REQUEST_ID.set(key.request_id)
        CALL.set(call)
        return call

    def report(self, spans: Iterable[StageSpan]) -> None:
        """Keep the spans of a reply; a later report of a span replaces an earlier one."""
        for span in spans:
            self.spans[span.stage, span.item, span.start] = span


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One span to export.

    Attributes:
        began, ended: seconds of the monotonic clock.
        link: a W3C `traceparent` to which it is linked; ignored if it is malformed.
    """

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str = ""
    link: str = ""


class SpanExporter(Protocol):
    """Exports spans; its methods do not wait."""

    def request(self, request_id: str, span: Span) -> None:
        """Export the root span of a request, with the stages of the gateway."""

    def call(self, call: WorkerCall, name: str, *, error: str = "") -> None:
        """Export the span of a call that ends now, with its stages, below that of its request."""

    def close(self) -> None:
        """Send what is left; waits for the collector, 30 seconds at most."""
