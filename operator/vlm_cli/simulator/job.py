"""Simulated time, and one request in flight with its TTFT by stage."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from vlm_cli.simulator.trace import Request


class Clock:
    """Runs events in the order of their time, then of their scheduling. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Schedule `event` at `moment` seconds; a moment in the past means now."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule `event` after `seconds`."""
        self.at(self.now + seconds, event)

    def run(self, until: float) -> None:
        """Run all events up to and including `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request in flight. Its writers are the gateway and the pod that runs it.

    Times are in seconds of the `Clock`. They are None before the event.

    Attributes:
        visual_tokens: visual tokens of all its images.
        cached_tokens: prompt tokens at the head that the next prefill skips.
        delivered: tokens that the client has received.
        images_left: number of images that are not encoded yet.
        queued_at: arrival at its present pod.
        started_at: start of its first prefill step in this attempt.
        prefilled: prompt tokens computed in this attempt.
        queued_seconds: predicted seconds of its prefill that its pod counts as queued.
        stages: seconds by stage of TTFT.
        embedded_at: arrival of its last embedding at prefill.
        reserved_at: time of its KV reservation on a decode pod.
        refused: whether the gateway refused it.
        wake_seconds: wait for the pods of a service at zero; its stages begin after it.
    """

    request: Request
    visual_tokens: int
    cached_tokens: int = 0
    delivered: int = 0
    images_left: int = 0
    queued_at: float = 0.0
    started_at: float | None = None
    prefilled: int = 0
    queued_seconds: float = 0.0
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    embedded_at: float | None = None
    reserved_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: bool = False
    wake_seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens that prefill computes or skips: the prompt, and the delivered tokens."""
        return self.request.text_tokens + self.visual_tokens + self.delivered

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that are not delivered yet."""
        return self.request.output_tokens - self.delivered

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there is none yet."""
        return None if self.first_token_at is None else self.first_token_at - self.request.at

    def add_stage(self, stage: str, seconds: float) -> None:
        """Add time to a stage; ignored after the first token."""
        if self.first_token_at is None and seconds > 0:
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def add_other(self, ttft: float) -> None:
        """Add the part of `ttft` that belongs to no stage to the stage `other`."""
        rest = ttft - sum(self.stages.values())
        if rest > 1e-9:
            self.stages["other"] = self.stages.get("other", 0.0) + rest
