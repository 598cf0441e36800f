"""Session pins: cached images that are evicted after all others, while a conversation lives. Pure.

    pin(key)  ─▶ until now + seconds; a later turn renews it
    is_pinned ─▶ eviction takes it only if nothing else is left
    dropped   ─▶ EXPIRED: no turn renewed it; BOUND: others need its share; EVICTED: nothing else
                 was left; REPLACED: its owner forgot it otherwise

A session pin holds no memory: an entry with one may be evicted. It is not the pin of a user of an
embedding (`encoder_cache`). Both tiers of memory share one value, the disk has its own.

Laws (tests/worker/core/test_session_pins.py):

    S1  the bytes of all pins never exceed `max_bytes`; the pin that was renewed first is dropped
    S2  a pin ends `seconds` after its last renewal
    S3  the counts equal the sums over the pins; without `pin`, nothing changes
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

MAX_PERCENT: Final = 50
"""Share of a cache that session pins may have: other images keep the rest."""

K = TypeVar("K", bound=Hashable)


class DropReason(enum.StrEnum):
    """Why a session pin ended."""

    EXPIRED = "expired"
    BOUND = "bound"
    EVICTED = "evicted"
    REPLACED = "replaced"


class SessionPins(Generic[K]):
    """Pins by key, the one renewed first goes first. Time is an argument, in seconds."""

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_dropped: Counter[DropReason] = Counter(dict.fromkeys(DropReason, 0))
        self._pins: dict[K, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def is_used(self) -> bool:
        """Whether there is a pin, or was one."""
        return bool(self._pins) or self.num_dropped.total() > 0

    def pin(self, key: K, num_bytes: int, *, until: float) -> None:
        """Pin or renew a key. `until` must not be before that of an earlier call.

        If it alone exceeds the bound, it is dropped at once.
        """
        self._forget(key)
        if num_bytes > self.max_bytes:
            self.num_dropped[DropReason.BOUND] += 1
            return
        while self.num_bytes + num_bytes > self.max_bytes:
            self.drop(next(iter(self._pins)), DropReason.BOUND)
        self._pins[key] = until, num_bytes
        self.num_bytes += num_bytes

    def seconds_left(self, key: K, *, now: float) -> float:
        """Seconds until the pin of a key ends; 0 without one."""
        until, _ = self._pins.get(key, (now, 0))
        return max(until - now, 0.0)

    def seconds_to_end(self, *, now: float) -> float | None:
        """Seconds until the next pin ends; None without pins."""
        until, _ = next(iter(self._pins.values()), (None, 0))
        return None if until is None else max(until - now, 0.0)

    def drop(self, key: K, reason: DropReason) -> None:
        """End the pin of a key, if it has one."""
        self.num_dropped[reason] += self._forget(key)

    def expire(self, *, now: float) -> None:
        """End the pins whose time is over."""
        while self._pins:
            key, (until, _) = next(iter(self._pins.items()))
            if until > now:
                return
            self.drop(key, DropReason.EXPIRED)

    def first_without(self, keys: Iterable[K]) -> K | None:
        """The first of the keys that has no pin; None if all have one. Changes nothing."""
        return next((key for key in keys if key not in self._pins), None)

    def check(self) -> None:
        """Raise AssertionError if the counts and the pins disagree."""
        assert self.num_bytes == sum(num_bytes for _, num_bytes in self._pins.values())
        assert self.num_bytes <= self.max_bytes, "S1: the session pins exceed their bound"
        ends = [until for until, _ in self._pins.values()]
        assert ends == sorted(ends), "S2: the pins are not in the order of their ends"

    def _forget(self, key: K) -> bool:
        pin = self._pins.pop(key, None)
        if pin is None:
            return False
        self.num_bytes -= pin[1]
        return True
