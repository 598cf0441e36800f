"""Counts of all gateways within the last window, as a ring of twelve slots. Pure.

tick k  counters of each gateway minus those of tick k-1 ─▶ slot ⌊now / slot width⌋
total   Σ slots of one window; p95 by interpolation inside a bucket

Counters are cumulative since the gateway's start. A new boot id counts from zero. A gateway that is
gone keeps its counts until they leave the window. If a counter decreased, that tick adds nothing.
The first sample of a process is the zero of its counting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from vlm_operator.names import Role
from vlm_operator.state import Sample, StageSeconds, Ttft

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)
QUANTILE = 0.95
SLOTS = 12
ITL = "itl"  # the key of ITL beside the modalities of TTFT
LATELY_SECONDS = 60.0
MAX_GATEWAYS = 256  # boot ids whose last counters are kept


@dataclasses.dataclass(frozen=True)
class Tally:
    """Requests of one modality within some time.

    Attributes:
        buckets: upper bound in seconds → requests between the next lower bound and it; without
            empty buckets.
        met, missed_seconds: seconds by stage of requests that met, and that missed their target.
        stage_buckets: as `buckets`, by stage.
    """

    count: int = 0
    missed: int = 0
    buckets: Mapping[float, int] = dataclasses.field(default_factory=dict)
    met: Mapping[str, float] = dataclasses.field(default_factory=dict)
    missed_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stage_buckets: Mapping[str, Mapping[float, int]] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        names = self.stage_buckets.keys() | other.stage_buckets.keys()
        return Tally(
            count=self.count + other.count,
            missed=self.missed + other.missed,
            buckets=_sum(self.buckets, other.buckets),
            met=_sum(self.met, other.met),
            missed_seconds=_sum(self.missed_seconds, other.missed_seconds),
            stage_buckets={
                name: _sum(self.stage_buckets.get(name, {}), other.stage_buckets.get(name, {}))
                for name in names
            },
        )

    def stage_seconds(self, stage: str) -> float:
        """Seconds of all requests in one stage."""
        return self.met.get(stage, 0.0) + self.missed_seconds.get(stage, 0.0)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The counts of one twelfth of a window, by modality."""

    number: int
    tallies: Mapping[str, Tally]


@dataclasses.dataclass(frozen=True)
class Window:
    """The last counters of all gateways, and the counts of the window.

    Attributes:
        counters: by boot id and modality; None before the first sample.
        slots: oldest first.
        closed: sum of all slots but the newest, so that a tick adds only one slot.
    """

    counters: Mapping[str, Mapping[str, Ttft]] | None = None
    slots: tuple[Slot, ...] = ()
    closed: Slot | None = None

    def advance(self, samples: Iterable[Sample], *, now: float, window: float) -> Window:
        """Add the samples of one tick; returns `self` if no gateway counted anything.

        `window` is its length in seconds.
        """
        seen = {item.boot_id: _counters(item) for item in samples if item.role is Role.GATEWAY}
        known = self.counters
        if known is None:
            return Window(seen) if seen else self
        if all(known.get(boot) == counters for boot, counters in seen.items()):
            return self
        number = _number(now, window)
        kept = [slot for slot in self.slots if number - SLOTS < slot.number < number]
        # if the clock went back, the newest slot takes the counts
        newest = [slot for slot in self.slots if slot.number >= number][:1]
        tallies = dict(newest[0].tallies) if newest else {}
        grown = _total(
            {name: tally}
            for boot, counters in seen.items()
            for name, item in counters.items()
            if (tally := growth(known.get(boot, {}).get(name), item)) is not None
        )
        slots = (*kept, Slot(number, _total([tallies, grown])))
        closed = self.closed
        if closed is None or closed.number != number or len(slots) < len(self.slots):
            closed = Slot(number, _total(slot.tallies for slot in kept))
        # the newest last, so that the oldest are dropped
        last = {boot: item for boot, item in known.items() if boot not in seen} | seen
        return Window(dict(list(last.items())[-MAX_GATEWAYS:]), slots, closed)

    def total(self, *, now: float, window: float) -> dict[str, Tally]:
        """Return the counts of the last window, by modality."""
        number = _number(now, window)
        if self.closed is not None and self.closed.number == number:
            return _total([self.closed.tallies, self.slots[-1].tallies])
        return self._since(number - SLOTS + 1)

    def lately(self, *, now: float, window: float) -> dict[str, Tally]:
        """Return the counts of the last minute's slots, at least of the newest slot."""
        newest = _number(now, window)
        return self._since(min(newest, _number(now - LATELY_SECONDS, window) + 1))

    def edges(self, modality: str) -> list[float]:
        """Return the bucket bounds of a modality in the last counters of any gateway."""
        return _bounds(item.buckets for item in self._counted(modality))

    def stage_edges(self, modality: str) -> list[float]:
        """Return the bucket bounds of the modality's stages."""
        counted = self._counted(modality)
        return _bounds(stage.buckets for item in counted for stage in item.stages.values())

    def _counted(self, modality: str) -> list[Ttft]:
        known = self.counters or {}
        return [counters[modality] for counters in known.values() if modality in counters]

    def _since(self, first: int) -> dict[str, Tally]:
        return _total(slot.tallies for slot in self.slots if slot.number >= first)


def growth(before: Ttft | None, now: Ttft) -> Tally | None:
    """Return what one gateway counted between two samples; None if a counter decreased.

    The gateway's bucket bounds follow the target. Only bounds of both samples show growth.
    """
    if before is None:
        before = Ttft(0, 0, 0.0, dict.fromkeys(now.buckets, 0), {})
    count, missed = now.count - before.count, now.missed - before.missed
    if count <= 0 or missed < 0:
        return None
    buckets = _increments(before.buckets, now.buckets)
    if buckets is None:
        return None
    met, missed_seconds, stages = {}, {}, {}
    for name, stage in now.stages.items():
        old = before.stages.get(name, StageSeconds(0.0, 0.0, dict.fromkeys(stage.buckets, 0)))
        met[name] = max(0.0, stage.met - old.met)
        missed_seconds[name] = max(0.0, stage.missed - old.missed)
        if stage.buckets:
            stages[name] = _increments(old.buckets, stage.buckets) or {}
    return Tally(count, min(missed, count), buckets, met, missed_seconds, stages)


def percentile(buckets: Mapping[float, int], *, edges: Iterable[float] = ()) -> float | None:
    """Return the 95th percentile, linear inside its bucket as Prometheus' histogram_quantile.

    Args:
        buckets: as in `Tally`.
        edges: bounds of empty buckets.

    Returns:
        The last finite bound if the percentile is beyond it; None if there are no counts.
    """
    rank, below = QUANTILE * sum(buckets.values()), 0
    if rank <= 0:
        return None
    bounds = sorted({*buckets, *edges} - {math.inf})
    for index, bound in enumerate(bounds):
        inside = buckets.get(bound, 0)
        if below + inside >= rank and inside:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bound - lower) * (rank - below) / inside
        below += inside
    return bounds[-1] if bounds else None


def _counters(sample: Sample) -> dict[str, Ttft]:
    """Return a gateway's counters of TTFT by modality, and of ITL in the same form."""
    if sample.gaps is None:
        return dict(sample.ttft)
    return {**sample.ttft, ITL: Ttft(sample.gaps.count, 0, 0.0, sample.gaps.buckets, {})}


def _bounds(buckets: Iterable[Mapping[float, int]]) -> list[float]:
    return sorted({bound for item in buckets for bound in item})


def _number(now: float, window: float) -> int:
    return math.floor(now * SLOTS / max(window, 1e-3))


def _total(parts: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    found: dict[str, Tally] = {}
    for part in parts:
        for name, tally in part.items():
            found[name] = found[name] + tally if name in found else tally
    return found


def _increments(before: Mapping[float, int], now: Mapping[float, int]) -> dict[float, int] | None:
    """Return the growth of each bucket from cumulative counts; None if a count decreased."""
    found: dict[float, int] = {}
    below = 0
    for bound in sorted(now.keys() & before.keys()):
        added = now[bound] - before[bound]
        if added < below:
            return None
        if added > below:
            found[bound] = added - below
        below = added
    return found


def _sum(left: Mapping[Key, Number], right: Mapping[Key, Number]) -> Mapping[Key, Number]:
    if not (left and right):
        return left or right
    found = dict(left)
    for key, value in right.items():
        found[key] = found[key] + value if key in found else value
    return found
