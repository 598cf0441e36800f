"""When everything of one request happened, on this gateway's clock, until its first token left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vlm_worker.gateway import timeline
from vlm_worker.types import StageSpan
from vlm_worker.wire.calls import Reply


class OpenCall:
    """A call under way; collects what its replies report. `outbound` owns its way to the worker."""

    def __init__(self, started: float, clock: Callable[[], float], *, outbound: str | None) -> None:
        self._started = started
        self._clock = clock
        self._outbound = outbound
        self._reports: list[timeline.Report] = []

    def report(self, reply: Reply[Any]) -> None:
        """A reply came, now."""
        self._reports.append(timeline.Report(self._clock(), reply.clock, reply.spans))

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        """Its spans on the gateway's clock; nothing where no reply came."""
        if not self._reports:
            return ()
        call = timeline.Call(self._started, tuple(self._reports))
        if self._outbound is None:
            return call.spans
        return (StageSpan(self._outbound, self._started, call.arrived), *call.spans)


class Trace:
    """The times of one request; written by its own tasks alone.

    `received` is when its last byte was there, `first_byte` when the first token's left.
    """

    def __init__(self, *, received: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.received = received
        self.first_byte: float | None = None
        self._spans: list[StageSpan] = []
        self._calls: list[OpenCall] = []
        self._gateway_since: float | None = received

    def call(self, *, outbound: str | None = None) -> OpenCall:
        """A call to a worker starts now; `outbound` is the stage that its way there belongs to."""
        call = OpenCall(self.clock(), self.clock, outbound=outbound)
        self._calls.append(call)
        return call

    @contextlib.contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """A stage whose time the gateway measures itself."""
        started = self.clock()
        try:
            yield
        finally:
            self._spans.append(StageSpan(stage, started, self.clock()))

    def gateway_works(self) -> None:
        """From now on the request waits for this gateway."""
        if self._gateway_since is None:
            self._gateway_since = self.clock()

    def gateway_waits(self) -> None:
        """From now on it waits for others."""
        if self._gateway_since is not None:
            self._spans.append(StageSpan("gateway", self._gateway_since, self.clock()))
            self._gateway_since = None

    def first_byte_left(self) -> None:
        """The first token is on its way to the client."""
        if self.first_byte is None:
            self.gateway_waits()
            self.first_byte = self.clock()

    def stages(self) -> dict[str, float]:
        """Seconds by stage, their sum being the TTFT; only after the first byte left."""
        assert self.first_byte is not None
        spans = [*self._spans, *(span for call in self._calls for span in call.spans)]
        return timeline.attribute(spans, received=self.received, first_byte=self.first_byte)

    @property
    def ttft(self) -> float:
        """Seconds; only after the first byte left."""
        assert self.first_byte is not None
        return self.first_byte - self.received
