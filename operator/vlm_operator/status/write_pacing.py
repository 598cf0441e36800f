"""Decides when a status is written: decisions at once, measured values at most every 30 s. Pure.

Otherwise the operator would write the status of a service under load on each turn.
"""

from __future__ import annotations

import copy

from vlm_operator.state import Manifest

MEASURED_SECONDS = 30.0
_SUMMARY = ("ttftP95", "kvOccupancyPercent", "dominantStage")
_POOL = ("load", "recommendation")


class WritePacing:
    """Paces status writes of one service. Its one writer is the service's reporter."""

    def __init__(self) -> None:
        self._measured_at = float("-inf")

    def due(self, before: Manifest, after: Manifest, *, now: float) -> Manifest:
        """Return the status to write: `after`, or `before` if only measured values differ.

        `now` is in seconds. At most every `MEASURED_SECONDS`, measured values are written too.
        """
        if before == after:
            return before
        if meaning(before) == meaning(after) and now - self._measured_at < MEASURED_SECONDS:
            return before
        self._measured_at = now
        return after


def meaning(status: Manifest) -> Manifest:
    """Return a status without its measured values."""
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
