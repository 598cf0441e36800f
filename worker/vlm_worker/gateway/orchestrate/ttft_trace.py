"""Times of one request on the gateway's clock, and their attribution to stages (TTFT).

    gateway clock   |received                                                     first byte|
    spans           [gateway][reserve][media][queue][encode     ]
                                              ········[embed_transfer]
                                              [prefill_queue  ·······][prefill][gateway]
    owners          |gateway |reserve |media |queue |encode     |trans|prefill |gateway|

Exactly one stage owns each instant, so the stages add up to the TTFT. `attribute` follows the
critical path back from the first byte: the span that ended last owns the time since its start, and
so on. A span that waits for another one (a transfer for its encode, a queue or a prefill for its
transfers) owns only the time after that one's end. Time without a span is `other`, mostly network.

Workers report offsets from the arrival of a call. The arrival on the gateway's clock is estimated
from the times of the replies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vlm_worker.types import STAGES, StageSpan
from vlm_worker.wire.messages import Reply


class Trace:
    """The times of one request. Only its tasks write it.

    `received` is the time of the last byte of the request and of the images that it names by URL,
    or of the end of its wait for a service at zero. `first_byte` is the time when the first token
    was sent. Both are seconds on `clock`.
    """

    def __init__(self, *, received: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.received = received
        self.first_byte: float | None = None
        self.wake_seconds = 0.0
        self.fetch_seconds = 0.0
        self._wakes_since: float | None = None
        self._spans: list[StageSpan] = []
        self._calls: list[Call] = []
        self._gateway_since: float | None = received
        self._attributed: tuple[tuple[int, int], dict[str, float]] | None = None

    def call(self, *, outbound: str | None = None) -> Call:
        """Start a call to a worker; `outbound` is the stage of its way there."""
        call = Call(self.clock(), clock=self.clock, outbound=outbound)
        self._calls.append(call)
        return call

    @contextlib.contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Measure a stage on the gateway's clock."""
        started = self.clock()
        try:
            yield
        finally:
            self._spans.append(StageSpan(stage, started, self.clock()))

    def gateway_works(self) -> None:
        """Start a span of the gateway's work on the request."""
        if self._gateway_since is None:
            self._gateway_since = self.clock()

    def gateway_waits(self) -> None:
        if self._gateway_since is not None:
            self._spans.append(StageSpan("gateway", self._gateway_since, self.clock()))
            self._gateway_since = None

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Measure the fetches of images. TTFT starts at their end: the pools cannot shorten it."""
        started = self.clock()
        try:
            yield
        finally:
            now = self.clock()
            self.fetch_seconds += now - started
            self._gateway_since = self.received = now

    @contextlib.contextmanager
    def waking(self) -> Iterator[None]:
        """Measure a wait for the pods of a service at zero.

        Before the first token, TTFT and its stages start again at the end of the wait:
        `wake_seconds` has the time until then.
        """
        self._wakes_since = started = self.clock()
        try:
            yield
        finally:
            self._wakes_since, now = None, self.clock()
            self.wake_seconds += now - started
            if self.first_byte is None:
                self._spans.clear()
                self._calls.clear()
                self._gateway_since = self.received = now

    @property
    def waking_seconds(self) -> float | None:
        """Seconds of the running wait for a wake-up; None if there is none."""
        return None if self._wakes_since is None else self.clock() - self._wakes_since

    def first_byte_sent(self) -> None:
        """Record that the first token was sent."""
        if self.first_byte is None:
            self.gateway_waits()
            self.first_byte = self.clock()

    @property
    def own_spans(self) -> tuple[StageSpan, ...]:
        """The stages that the gateway measured, on its clock."""
        return tuple(self._spans)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage; they add up to the TTFT. Call after the first byte."""
        assert self.first_byte is not None
        # a request asks several times, and in between nothing may have been measured
        version = len(self._spans), sum(len(call.reports) for call in self._calls)
        if self._attributed is None or self._attributed[0] != version:
            spans = [*self._spans, *(span for call in self._calls for span in call.spans)]
            owned = attribute(spans, received=self.received, first_byte=self.first_byte)
            self._attributed = version, owned
        return dict(self._attributed[1])

    @property
    def ttft(self) -> float:
        """TTFT in seconds; valid after the first byte."""
        assert self.first_byte is not None
        return self.first_byte - self.received


_OTHER = "other"
# A span of the key waits for the end of spans of the value.
_WAITS_FOR = {
    "encode": ("media", "encoder_queue"),
    "encoder_queue": ("media",),
    "embed_transfer": ("media", "encoder_queue", "encode"),
    "prefill_queue": ("media", "encoder_queue", "encode", "embed_transfer"),
    "prefill": ("media", "encoder_queue", "encode", "embed_transfer", "prefill_queue"),
}
_WHOLE_REQUEST = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The times that one reply reports about its call.

    Attributes:
        received: arrival of the reply, on the gateway's clock.
        clock: seconds since the call's arrival when the worker wrote it, on the worker's clock.
        spans: offsets in seconds from the call's arrival.
    """

    received: float
    clock: float
    spans: tuple[StageSpan, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """A call to a worker: its start on the gateway's clock, and the reports of its replies.

    `outbound` is the stage of the time until the call arrives at the worker.
    """

    started: float
    reports: list[Report] = dataclasses.field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    outbound: str | None = None

    def report(self, reply: Reply[Any]) -> None:
        """Record a reply that arrived now."""
        self.reports.append(Report(self.clock(), reply.clock, reply.spans))

    @property
    def arrived(self) -> float:
        """Estimated arrival at the worker, on the gateway's clock.

        The estimate assumes equal times in both directions, for the reply with the least time in
        flight.
        """
        latest = min(r.received - r.clock for r in self.reports)
        return (self.started + max(latest, self.started)) / 2

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        """The call's spans on the gateway's clock; empty without a reply.

        The longest report of a span counts.
        """
        if not self.reports:
            return ()
        placed: dict[tuple[str, int, float], StageSpan] = {}
        for report in self.reports:
            for span in report.spans:
                key = (span.stage, span.item, span.start)
                known = placed.get(key)
                if known is None or known.end < span.end:
                    placed[key] = span
        at = self.arrived
        spans = [StageSpan(s.stage, at + s.start, at + s.end, s.item) for s in placed.values()]
        if self.outbound is not None:
            spans.append(StageSpan(self.outbound, self.started, at))
        return tuple(spans)


def attribute(
    spans: Iterable[StageSpan], *, received: float, first_byte: float
) -> dict[str, float]:
    """Return the seconds that each stage owns, in the order of `types.STAGES`.

    The `spans` are on the gateway's clock, from the gateway and all workers. The sum of the result
    is `first_byte - received`.
    """
    known = [_clip(s, received, first_byte) for s in spans if s.stage in STAGES]
    inside = _without_waits([s for s in known if s.end > s.start])
    owned = dict.fromkeys(STAGES, 0.0)
    now = first_byte
    while now > received:
        last = max(
            (s for s in inside if s.end <= now), key=lambda s: (s.end, -s.start), default=None
        )
        boundary = received if last is None else last.end
        for stage, start, end in _gap(inside, boundary, now):
            owned[stage] += end - start
        if last is None:
            break
        owned[last.stage] += last.end - last.start
        now = last.start
    return owned


def _clip(span: StageSpan, start: float, end: float) -> StageSpan:
    if start <= span.start <= span.end <= end:
        return span
    low, high = max(span.start, start), min(span.end, end)
    return StageSpan(span.stage, low, max(low, high), span.item)


def _without_waits(spans: Sequence[StageSpan]) -> list[StageSpan]:
    """Return the spans without the parts in which they waited for the end of others.

    If a stage has several spans for an item (one per chunk), they contain no waiting time and stay
    unchanged.
    """
    pieces = Counter((span.stage, span.item) for span in spans)
    trimmed = []
    for span in spans:
        if span.stage in _WAITS_FOR and pieces[span.stage, span.item] == 1:
            start = max([span.start, *(s.end for s in spans if _waits(span, s))])
            trimmed.append(StageSpan(span.stage, start, span.end, span.item))
        else:
            trimmed.append(span)
    return trimmed


def _waits(span: StageSpan, other: StageSpan) -> bool:
    same_item = span.item == other.item or _WHOLE_REQUEST in (span.item, other.item)
    return same_item and other.stage in _WAITS_FOR.get(span.stage, ()) and other.end < span.end


def _gap(
    spans: Sequence[StageSpan], start: float, end: float
) -> Iterable[tuple[str, float, float]]:
    """Yield the owners of a time in which no span ended: the earliest running span, else other."""
    running = min((s for s in spans if s.start < end < s.end), key=lambda s: s.start, default=None)
    if running is None:
        yield _OTHER, start, end
        return
    since = max(start, running.start)
    yield running.stage, since, end
    if since > start:
        yield _OTHER, start, since
