"""How many sequences may run at once, so that a step takes about as long as it should. Pure.

mean of 10 steps    > 1.2 x target    2 fewer than ran
                    < 0.8 x target    2 more, if as many ran as might
                    between           as before

After each change ten new steps are awaited, so that no limit is judged by the steps of another.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

WINDOW: Final = 10
BAND: Final = 0.2
CHANGE: Final = 2


class LimitReason(enum.StrEnum):
    """Why the limit is what it is.

    FIXED: there is no target. STARTING: too few steps are measured. SLOWER, FASTER: the last window
    was, so that the limit fell or rose. ON_TARGET: it was inside the band. UNUSED: it was faster,
    with fewer running than might. AT_BOUND: it cannot fall or rise any further.
    """

    FIXED = "fixed"
    STARTING = "starting"
    SLOWER = "slower"
    FASTER = "faster"
    ON_TARGET = "on_target"
    UNUSED = "unused"
    AT_BOUND = "at_bound"


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """How many sequences may run, and why."""

    value: int
    reason: LimitReason


class AdaptiveLimit:
    """The limit on running sequences under which steps meet a target.

    Args:
        target_seconds: of a step; None keeps the limit at `maximum`.
        minimum: the limit never falls below it.
        maximum: nor rises above it.
        start: where it begins, within these bounds.
    """

    def __init__(
        self, target_seconds: float | None, *, minimum: int = 1, maximum: int, start: int = 8
    ) -> None:
        assert 1 <= minimum <= maximum
        self.limit = Limit(maximum, LimitReason.FIXED)
        if target_seconds is not None:
            self.limit = Limit(min(max(start, minimum), maximum), LimitReason.STARTING)
        self._target = target_seconds
        self._minimum, self._maximum = minimum, maximum
        self._seconds: list[float] = []
        self._most_running = 0

    def observe(self, step_seconds: float, *, num_running: int) -> Limit:
        """Note a step in which `num_running` sequences ran; returns the limit from now on."""
        if self._target is None:
            return self.limit
        self._seconds.append(step_seconds)
        self._most_running = max(self._most_running, num_running)
        if len(self._seconds) == WINDOW:
            self.limit = self._judge(sum(self._seconds) / WINDOW / self._target)
            self._seconds.clear()
            self._most_running = 0
        return self.limit

    def _judge(self, ratio: float) -> Limit:
        value = self.limit.value
        if ratio > 1 + BAND:
            lower = max(min(value, self._most_running) - CHANGE, self._minimum)
            return _changed(value, lower, LimitReason.SLOWER)
        if ratio >= 1 - BAND:
            return Limit(value, LimitReason.ON_TARGET)
        if self._most_running < value:
            return Limit(value, LimitReason.UNUSED)
        return _changed(value, min(value + CHANGE, self._maximum), LimitReason.FASTER)


def _changed(before: int, after: int, reason: LimitReason) -> Limit:
    return Limit(after, LimitReason.AT_BOUND if after == before else reason)
