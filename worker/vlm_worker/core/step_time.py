"""Predicts step time, and limits running sequences so that steps meet a target. Pure.

prediction   seconds = base + per_unit * units      least squares; old steps lose weight

limit        mean of 10 steps   > 1.2 x target      2 less than the number that ran
                                < 0.8 x target      2 more, if the limit was reached
                                between             unchanged

After each change, ten new steps are measured before the next one.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

FADE: Final = 0.99
"""Factor on the weight of old steps per new step: about the last 100 steps count."""

MIN_RETRY_SECONDS: Final = 0.1
MAX_RETRY_SECONDS: Final = 30.0


def retry_after(queued_seconds: float) -> float:
    """Seconds after which to retry a full queue with this predicted work: 0.1 to 30."""
    return min(max(queued_seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class StepTimeModel:
    """Fits seconds over units (tokens) of one kind of step."""

    def __init__(self) -> None:
        self._weight = self._units = self._seconds = 0.0
        self._units_units = self._units_seconds = 0.0

    def observe(self, units: int, seconds: float) -> None:
        self._weight = self._weight * FADE + 1.0
        self._units = self._units * FADE + units
        self._seconds = self._seconds * FADE + seconds
        self._units_units = self._units_units * FADE + float(units) * units
        self._units_seconds = self._units_seconds * FADE + units * seconds

    @property
    def seconds_per_unit(self) -> float:
        """Seconds that one more unit costs, never negative; 0 before the first measurement.

        If all steps had the same size, the slope is undetermined, and the mean rate is used.
        """
        if not self._units:
            return 0.0
        spread = self._weight * self._units_units - self._units * self._units
        if spread <= 1e-9 * self._weight * self._units_units:
            return self._seconds / self._units
        slope = (self._weight * self._units_seconds - self._units * self._seconds) / spread
        return min(max(slope, 0.0), self._seconds / self._units)

    def predict(self, units: int, *, units_per_step: int) -> float:
        """Seconds for `units` of work that is done `units_per_step` at a time."""
        if not units or not self._weight:
            return 0.0
        slope = self.seconds_per_unit
        base = max((self._seconds - slope * self._units) / self._weight, 0.0)
        return slope * units + base * -(-units // max(units_per_step, 1))


WINDOW: Final = 10
BAND: Final = 0.2
CHANGE: Final = 2


class LimitReason(enum.StrEnum):
    """Why the limit has its value.

    FIXED: there is no target. STARTING: too few steps were measured. SLOWER, FASTER: the last
    window was slower or faster than the band, so the limit changed. ON_TARGET: it was inside the
    band. UNUSED: it was faster, but fewer sequences than the limit ran. AT_BOUND: the limit is at
    its minimum or maximum.
    """

    FIXED = "fixed"
    STARTING = "starting"
    SLOWER = "slower"
    FASTER = "faster"
    ON_TARGET = "on_target"
    UNUSED = "unused"
    AT_BOUND = "at_bound"


class Limit(NamedTuple):
    """The number of sequences that may run, and the reason."""

    value: int
    reason: LimitReason


class AdaptiveLimit:
    """Adapts the limit on running sequences so that steps meet a target; None fixes it."""

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
        self._max_running = 0

    def observe(self, step_seconds: float, *, num_running: int) -> Limit:
        """Record a step of `num_running` sequences; returns the new limit."""
        if self._target is None:
            return self.limit
        self._seconds.append(step_seconds)
        self._max_running = max(self._max_running, num_running)
        if len(self._seconds) == WINDOW:
            self.limit = self._judge(sum(self._seconds) / WINDOW / self._target)
            self._seconds.clear()
            self._max_running = 0
        return self.limit

    def _judge(self, ratio: float) -> Limit:
        value = self.limit.value
        if ratio > 1 + BAND:
            lower = max(min(value, self._max_running) - CHANGE, self._minimum)
            return self._changed(lower, LimitReason.SLOWER)
        if ratio >= 1 - BAND:
            return Limit(value, LimitReason.ON_TARGET)
        if self._max_running < value:
            return Limit(value, LimitReason.UNUSED)
        return self._changed(min(value + CHANGE, self._maximum), LimitReason.FASTER)

    def _changed(self, value: int, reason: LimitReason) -> Limit:
        return Limit(value, LimitReason.AT_BOUND if value == self.limit.value else reason)
