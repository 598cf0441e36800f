"""How much a second: growth of counters over the last minute, whoever asks and however often. Pure.

note(now, totals) ─ a sample for each second in which something grew ─▶ per_second(now, totals)
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Final

WINDOW_SECONDS: Final = 60.0
SAMPLE_SECONDS: Final = 1.0


class Rates:
    """Growth of some counters. They are noted at least once a second while they grow."""

    def __init__(self, started: float, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self.window_seconds = window_seconds
        self._started = started
        self._samples: collections.deque[tuple[float, dict[str, float]]] = collections.deque()

    def note(self, now: float, totals: Mapping[str, float]) -> None:
        """Remember what the counters say; what grows within a second counts as grown at once."""
        at = now
        if self._samples and now - self._samples[-1][0] < SAMPLE_SECONDS:
            at, _ = self._samples.pop()
        self._samples.append((at, dict(totals)))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.window_seconds:
            self._samples.popleft()

    def per_second(self, now: float, totals: Mapping[str, float]) -> dict[str, float]:
        """The mean rate of each counter since the window began, or since the start if later.

        Counters begin at 0. A rate is never negative.
        """
        begin = max(self._started, now - self.window_seconds)
        before: Mapping[str, float] = {}
        for at, sample in self._samples:
            if at > begin:
                break
            before = sample
        span = max(now - begin, SAMPLE_SECONDS)
        return {
            name: max(total - before.get(name, 0.0), 0.0) / span for name, total in totals.items()
        }
