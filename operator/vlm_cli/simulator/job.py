"""Simulated time, and one request in flight with its TTFT by stage."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from vlm_cli.simulator.trace import Request


class Clock:
    """Runs events in the order of their time, then of their scheduling.

    Only this class advances simulated time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Schedule `act` at `moment`; a moment in the past means now."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule `act` after `seconds`."""
        self.at(self.now + seconds, act)

    def run(self, until: float) -> None:
        """Run all events up to and including `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request in flight. Its writers are the gateway and the pod that runs it.

    Times are in seconds of the simulation's clock; they are None until the event.

    Attributes:
        visual_tokens: visual tokens of all its images.
        cached_tokens: prompt tokens at the head that the next prefill skips.
        delivered: tokens that the client has received.
        images_left: number of images that are not encoded yet.
        queued_at: start of waiting at its present pod.
        began_at: start of its first prefill step in this attempt.
        prefilled: prompt tokens computed in this attempt.
        pending: seconds of its work that its pod counts as queued.
        marks: seconds by stage of TTFT.
        embedded_at: arrival of its last embedding at prefill.
        reserved_at: time of its KV reservation on a decode pod.
        refused: whether the gateway refused it.
    """

    request: Request
    visual_tokens: int
    cached_tokens: int = 0
    delivered: int = 0
    images_left: int = 0
    queued_at: float = 0.0
    began_at: float | None = None
    prefilled: int = 0
    pending: float = 0.0
    marks: dict[str, float] = dataclasses.field(default_factory=dict)
    embedded_at: float | None = None
    reserved_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens that prefill computes or skips: the prompt, and the delivered tokens."""
        return self.request.text_tokens + self.visual_tokens + self.delivered

    @property
    def left(self) -> int:
        """Number of tokens that are not generated yet."""
        return self.request.output_tokens - self.delivered

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there is none yet."""
        return None if self.first_token_at is None else self.first_token_at - self.request.at

    def mark(self, stage: str, seconds: float) -> None:
        """Add time to a stage; ignored after the first token."""
        if self.first_token_at is None and seconds > 0:
            self.marks[stage] = self.marks.get(stage, 0.0) + seconds

    def mark_rest(self, ttft: float) -> None:
        """Add the part of `ttft` that no stage owns to `other`."""
        rest = ttft - sum(self.marks.values())
        if rest > 1e-9:
            self.marks["other"] = self.marks.get("other", 0.0) + rest
