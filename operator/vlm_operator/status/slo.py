"""TTFT per modality over a window, from the gateways' own counters.

Gateways count since they started; what happened within the window is the difference between two
readings, per gateway. A gateway that restarted (another boot id) counts from zero. Nothing is
recomputed while no request ends, so that an idle service writes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from vlm_operator.names import Role
from vlm_operator.state import Sample, Ttft

QUANTILE = 0.95
_KEPT_READINGS = 64


@dataclasses.dataclass(frozen=True)
class Reading:
    """All gateways' counters at one moment, by boot id and modality."""

    at: float
    counters: Mapping[tuple[str, str], Ttft]

    @property
    def total(self) -> int:
        """Requests counted since the gateways started."""
        return sum(item.count for item in self.counters.values())


@dataclasses.dataclass(frozen=True)
class ModalitySlo:
    """One modality within the window; p95 in seconds, shares in percent."""

    modality: str
    count: int
    p95_seconds: float
    stages: Mapping[str, int]

    @property
    def dominant_stage(self) -> str | None:
        """The stage with the largest share, None where none is known."""
        return max(self.stages, key=lambda name: self.stages[name]) if self.stages else None


@dataclasses.dataclass(frozen=True)
class SloWindow:
    """The readings of the last window, and what they said when a request last ended."""

    readings: tuple[Reading, ...] = ()
    found: tuple[ModalitySlo, ...] = ()

    def advance(self, samples: Iterable[Sample], *, now: float, window: float) -> SloWindow:
        """Take one more reading; computes anew only if a request ended since the last one."""
        counters = {
            (sample.boot_id, modality): ttft
            for sample in samples
            if sample.role is Role.GATEWAY
            for modality, ttft in sample.ttft.items()
        }
        reading = Reading(now, counters)
        if not self.readings:
            return SloWindow((reading,), self.found)
        if reading.counters == self.readings[-1].counters:
            return self
        kept = [item for item in self.readings if now - item.at <= window]
        # the last one before the window is where its first difference starts
        older = [item for item in self.readings if now - item.at > window][-1:]
        readings = _thin((*older, *kept, reading))
        return SloWindow(readings, _evaluate(readings[0], reading))


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """Return Prometheus' histogram_quantile of cumulative buckets, nan where they are empty."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return math.nan
    rank, lower, below = share * total, 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            if math.isinf(bound):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = bound, count
    return lower


def _evaluate(first: Reading, last: Reading) -> tuple[ModalitySlo, ...]:
    found = []
    for modality in sorted({modality for _, modality in last.counters}):
        buckets: dict[float, float] = {}
        missed: dict[str, float] = {}
        met: dict[str, float] = {}
        count = 0
        bounds = _common_bounds(first, last, modality)
        for (boot, name), now in last.counters.items():
            if name != modality:
                continue
            before = first.counters.get((boot, name))
            count += now.count - (before.count if before else 0)
            for bound in bounds:
                old = before.buckets[bound] if before else 0
                buckets[bound] = buckets.get(bound, 0.0) + now.buckets[bound] - old
            for stage, spent in now.stages.items():
                old_stage = before.stages.get(stage) if before else None
                missed[stage] = (
                    missed.get(stage, 0.0) + spent.missed - (old_stage.missed if old_stage else 0)
                )
                met[stage] = met.get(stage, 0.0) + spent.met - (old_stage.met if old_stage else 0)
        p95 = quantile(buckets, QUANTILE)
        if count > 0 and not math.isnan(p95):
            shares = _shares(missed) or _shares(met)
            found.append(ModalitySlo(modality, count, p95, shares))
    return tuple(found)


def _common_bounds(first: Reading, last: Reading, modality: str) -> frozenset[float]:
    """The bounds that every gateway counted by, then and now: some move with the target."""
    edges = [
        frozenset(reading.counters[key].buckets)
        for reading in (first, last)
        for key in reading.counters.keys() & last.counters.keys()
        if key[1] == modality
    ]
    return frozenset.intersection(*edges)


def _shares(spent: Mapping[str, float]) -> dict[str, int]:
    """Shares in percent; they add up to 100 but for rounding. Empty where nothing was spent."""
    total = sum(spent.values())
    if total <= 0:
        return {}
    return {name: round(100 * value / total) for name, value in sorted(spent.items()) if value > 0}


def _thin(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Halve the older readings when there are too many; first and last stay."""
    if len(readings) <= _KEPT_READINGS:
        return readings
    return (readings[0], *readings[1:-1:2], readings[-1])
