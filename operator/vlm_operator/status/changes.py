"""When a status is written: a changed meaning at once, measured figures at most every 30 s. Pure.

Without this a service under traffic would be written on each turn, since its load never rests.
"""

from __future__ import annotations

import copy

from vlm_operator.state import Manifest

MEASURED_SECONDS = 30.0
_SUMMARY = ("ttftP95", "kvOccupancyPercent", "dominantStage")
_POOL = ("load", "recommendation", "warmCostPerHour")


class Spaced:
    """What may be written now. Its one writer is the service's reporter."""

    def __init__(self) -> None:
        self._measured_at = float("-inf")

    def due(self, before: Manifest, after: Manifest, *, now: float) -> Manifest:
        """Return the status to write: `after`, or `before` where its measured figures may wait."""
        if before == after:
            return before
        if meaning(before) == meaning(after) and now - self._measured_at < MEASURED_SECONDS:
            return before
        self._measured_at = now
        return after


def meaning(status: Manifest) -> Manifest:
    """Return a status without the figures that are merely measured."""
    found = copy.deepcopy({key: value for key, value in status.items() if key != "model"})
    for name in _SUMMARY:
        found.get("summary", {}).pop(name, None)
    for pool in found.get("pools", {}).values():
        for name in _POOL:
            pool.pop(name, None)
        for variant in pool.get("variants", []):
            variant.pop("startupP90Seconds", None)
    for entry in found.get("slo", []):
        for name in ("ttftP95Milliseconds", "stages", "dominantStage"):
            entry.pop(name, None)
    return found
