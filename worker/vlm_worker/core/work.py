"""How long work will take: a straight line through the steps measured so far.

seconds = base + per_unit * units        least squares, old steps fade
"""

from __future__ import annotations

from typing import Final

FADE: Final = 0.99
"""Weight of the past at each new measurement: about the last hundred count."""

MIN_RETRY_SECONDS: Final = 0.1
MAX_RETRY_SECONDS: Final = 30.0


def retry_after(queued_seconds: float) -> float:
    """When to come back to a full queue that holds so much predicted work: 0.1 to 30 seconds."""
    return min(max(queued_seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class WorkModel:
    """Fits seconds over units (tokens) of one kind of step."""

    def __init__(self) -> None:
        self._weight = self._units = self._seconds = 0.0
        self._units_units = self._units_seconds = 0.0

    def observe(self, units: int, seconds: float) -> None:
        """One measured step of `units`."""
        self._weight = self._weight * FADE + 1.0
        self._units = self._units * FADE + units
        self._seconds = self._seconds * FADE + seconds
        self._units_units = self._units_units * FADE + float(units) * units
        self._units_seconds = self._units_seconds * FADE + units * seconds

    @property
    def seconds_per_unit(self) -> float:
        """The cost of one more unit, never negative; 0 before the first measurement.

        Where all steps had the same size no line is determined, and the mean rate stands in.
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
