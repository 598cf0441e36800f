"""What was called and what was cancelled, as long as a repetition may come. `now` is an argument.

A second call of the same attempt is a duplicate; a call of an attempt that was cancelled before it
came is cancelled at once: a Cancel may overtake what it cancels.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from vlm_worker.types import RequestKey

REMEMBER_SECONDS: Final = 600.0
MAX_REMEMBERED: Final = 200_000

T = TypeVar("T")


class History:
    """Bounded in time and in number; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._called: OrderedDict[tuple[str, RequestKey], float] = OrderedDict()
        self._cancelled: OrderedDict[RequestKey, float] = OrderedDict()

    def begin(self, name: str, key: RequestKey, *, now: float) -> bool:
        """Note a call; False where this call of this attempt came before."""
        _forget(self._called, now=now)
        if (name, key) in self._called:
            return False
        self._called[name, key] = now
        return True

    def forget(self, name: str, key: RequestKey) -> None:
        """A call that was refused and did nothing may come again."""
        self._called.pop((name, key), None)

    def cancel(self, key: RequestKey, *, now: float) -> None:
        """Note that whatever of this attempt comes later is cancelled."""
        _forget(self._cancelled, now=now)
        self._cancelled[key] = now

    def was_cancelled(self, key: RequestKey, *, now: float) -> bool:
        """Whether a cancel of this attempt came, not too long ago."""
        _forget(self._cancelled, now=now)
        return key in self._cancelled


def _forget(times: OrderedDict[T, float], *, now: float) -> None:
    while times:
        oldest = next(iter(times))
        if times[oldest] > now - REMEMBER_SECONDS and len(times) < MAX_REMEMBERED:
            return
        del times[oldest]
