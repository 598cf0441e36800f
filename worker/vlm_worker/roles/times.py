"""Pieces of one call's time, in seconds from its arrival."""

from __future__ import annotations

import time

from vlm_worker.types import StageSpan


class CallClock:
    """Starts when the call arrives. Instants are `time.monotonic()`, the engine's clock too."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()

    def now(self) -> float:
        """Seconds since the call arrived."""
        return time.monotonic() - self.arrived

    def span(self, stage: str, start: float, end: float | None = None, item: int = 0) -> StageSpan:
        """A span between two instants of the monotonic clock; `end` None is now."""
        end = time.monotonic() if end is None else end
        return StageSpan(stage, start - self.arrived, end - self.arrived, item)
