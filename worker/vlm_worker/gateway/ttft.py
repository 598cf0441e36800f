"""The time to first token of one modality since the start: for `/stats`, and for Prometheus.

The edges of its buckets follow the target, so that the share that missed it is exact and the 95th
percentile is read where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vlm_worker.core.histogram import Buckets, Histogram
from vlm_worker.metrics import SECONDS_BUCKETS, STAGE_BUCKETS
from vlm_worker.types import STAGES

TARGET_EDGES: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Edges around a target, in multiples of it."""


class TtftSummary:
    """Written by the event loop alone.

    With another target the edges around the old one go; what was counted there stays in the next
    higher bucket.
    """

    def __init__(self) -> None:
        self._seconds = Histogram(SECONDS_BUCKETS)
        self._target: float | None = None
        self._count = 0
        self._missed = 0
        self._stages = {stage: {"met": 0.0, "missed": 0.0} for stage in STAGES}
        self._stage_seconds = {stage: Histogram(STAGE_BUCKETS) for stage in STAGES}

    def add(self, seconds: float, stages: Mapping[str, float], target: float | None) -> bool:
        """Count one request; whether it met the target."""
        if target is not None and target != self._target:
            self._target = target
            self._seconds.regroup([*SECONDS_BUCKETS, *(target * share for share in TARGET_EDGES)])
        met = target is None or seconds <= target
        self._seconds.add(seconds)
        self._count += 1
        self._missed += not met
        for stage, share in stages.items():
            self._stages[stage]["met" if met else "missed"] += share
            self._stage_seconds[stage].add(share)
        return met

    @property
    def buckets(self) -> Buckets:
        """For Prometheus."""
        return self._seconds.buckets

    @property
    def body(self) -> dict[str, Any]:
        """As in `/stats`."""
        buckets = self._seconds.buckets
        return {
            "count": self._count,
            "missed": self._missed,
            "sum_seconds": buckets.total,
            "buckets": dict(buckets.cumulative),
            "stages": {
                stage: {**sums, "buckets": dict(self._stage_seconds[stage].buckets.cumulative)}
                for stage, sums in self._stages.items()
            },
        }
