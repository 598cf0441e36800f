"""Simulated time: runs events in the order of their time, then of their scheduling."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A heap of events. Only this class advances simulated time, in seconds."""

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
