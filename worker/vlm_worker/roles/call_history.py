"""Calls and cancellations of the last minutes. Pure: `now` is an argument.

A second call of the same attempt is a duplicate. If a Cancel overtakes the call that it cancels,
the call is cancelled when it arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from vlm_worker.types import RequestKey

REMEMBER_SECONDS: Final = 600.0
MAX_REMEMBERED: Final = 200_000

T = TypeVar("T")


class CallHistory:
    """Bounded in time and in number; the oldest entry is dropped first."""

    def __init__(self) -> None:
        self._called: OrderedDict[tuple[str, RequestKey], float] = OrderedDict()
        self._cancelled: OrderedDict[RequestKey, float] = OrderedDict()

    def begin(self, name: str, key: RequestKey, *, now: float) -> bool:
        """Record a call; False if this attempt made this call before."""
        _forget(self._called, now=now)
        if (name, key) in self._called:
            return False
        self._called[name, key] = now
        return True

    def forget(self, name: str, key: RequestKey) -> None:
        """Drop a call that was refused before it did anything: it may be repeated."""
        self._called.pop((name, key), None)

    def cancel(self, key: RequestKey, *, now: float) -> None:
        """Reject all later calls of this attempt."""
        _forget(self._cancelled, now=now)
        self._cancelled[key] = now

    def was_cancelled(self, key: RequestKey, *, now: float) -> bool:
        """Whether this attempt was cancelled in the last `REMEMBER_SECONDS`."""
        _forget(self._cancelled, now=now)
        return key in self._cancelled


def _forget(times: OrderedDict[T, float], *, now: float) -> None:
    while times:
        oldest = next(iter(times))
        if times[oldest] > now - REMEMBER_SECONDS and len(times) < MAX_REMEMBERED:
            return
        del times[oldest]
