"""What gateways counted within the last window, all of them together.

tick k:  counters of each gateway ──minus those at tick k-1──▶ slot ⌊now / width⌋, twelve a window
total(window) = Σ slots           p95 by interpolation inside a bucket

Gateways count since they started. A gateway with a new boot id counts from zero, one that vanished
leaves what it counted, and one whose counter fell starts anew: a counter that falls says nothing.
The first reading ever is where counting begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from vlm_operator.names import Role
from vlm_operator.state import Sample, Ttft

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)
QUANTILE = 0.95
SLOTS = 12  # of one window
ITL = "itl"  # the times between tokens, kept beside the modalities
LATELY_SECONDS = 60.0  # that a moment is judged by: an overrun that is over is no reason to grow
MAX_GATEWAYS = 256  # whose last counters are kept


@dataclasses.dataclass(frozen=True)
class Tally:
    """Requests of one modality within some time.

    Attributes:
        buckets: upper bound in seconds → requests between the next lower bound and it.
        met, missed_seconds: seconds by stage, of requests that met and that missed their target.
        stage_buckets: the same as `buckets`, by stage.
    """

    count: int = 0
    missed: int = 0
    buckets: Mapping[float, int] = dataclasses.field(default_factory=dict)
    met: Mapping[str, float] = dataclasses.field(default_factory=dict)
    missed_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stage_buckets: Mapping[str, Mapping[float, int]] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
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


@dataclasses.dataclass(frozen=True)
class Slot:
    """What was counted in one twelfth of a window, by modality."""

    number: int
    tallies: Mapping[str, Tally]


@dataclasses.dataclass(frozen=True)
class Window:
    """The last readings of all gateways, and what came within the window.

    Attributes:
        counters: the last reading by boot id and modality, None before the first.
        slots: oldest first.
        closed: sum of the slots of one window that no longer grow, so that a tick adds one slot.
    """

    counters: Mapping[str, Mapping[str, Ttft]] | None = None
    slots: tuple[Slot, ...] = ()
    closed: Slot | None = None

    def advance(self, samples: Iterable[Sample], *, now: float, window: float) -> Window:
        """Take one more reading; returns itself where no gateway counted anything."""
        seen = {item.boot_id: read(item) for item in samples if item.role is Role.GATEWAY}
        known = self.counters
        if known is None:
            return Window(seen) if seen else self
        if all(known.get(boot) == counters for boot, counters in seen.items()):
            return self
        grown: dict[str, Tally] = {}
        for boot, counters in seen.items():
            before = known.get(boot, {})
            for name, item in counters.items():
                tally = growth(before.get(name), item)
                if tally is not None:
                    grown[name] = grown[name] + tally if name in grown else tally
        # the newest at the end, so that the oldest of too many are forgotten
        last = {**{boot: item for boot, item in known.items() if boot not in seen}, **seen}
        last = dict(list(last.items())[-MAX_GATEWAYS:])
        slots = self._with(grown, now=now, window=window)
        closed = self.closed
        if closed is None or closed.number != slots[-1].number or len(slots) < len(self.slots):
            closed = Slot(slots[-1].number, _total(slots[:-1], slots[-1].number - SLOTS))
        return Window(last, slots, closed)

    def total(self, *, now: float, window: float) -> dict[str, Tally]:
        """Everything within the last window, by modality."""
        number = _number(now, window)
        if self.closed is not None and self.closed.number == number:
            return _total((self.closed, self.slots[-1]), number - SLOTS)
        return _total(self.slots, number - SLOTS)

    def lately(self, *, now: float, window: float) -> dict[str, Mapping[float, int]]:
        """The buckets of the slots of the last minute, at least of the newest one."""
        newest = _number(now, window)
        first = min(newest, _number(now - LATELY_SECONDS, window) + 1)
        found: dict[str, Mapping[float, int]] = {}
        for slot in self.slots:
            if slot.number >= first:
                for name, tally in slot.tallies.items():
                    found[name] = _sum(found.get(name, {}), tally.buckets)
        return found

    def edges(self, name: str) -> tuple[float, ...]:
        """The bounds by which any gateway counts a modality now, ascending."""
        found = self._counted(name)
        return tuple(sorted({bound for item in found for bound in item.buckets}))

    def stage_edges(self, name: str) -> tuple[float, ...]:
        """The same of its stages."""
        stages = [stage for item in self._counted(name) for stage in item.stages.values()]
        return tuple(sorted({bound for stage in stages for bound in stage.buckets}))

    def _counted(self, name: str) -> list[Ttft]:
        known = self.counters or {}
        return [counters[name] for counters in known.values() if name in counters]

    def _with(self, grown: Mapping[str, Tally], *, now: float, window: float) -> tuple[Slot, ...]:
        number = _number(now, window)
        kept = [slot for slot in self.slots if number - SLOTS < slot.number < number]
        # a clock that was put back adds to the newest slot
        same = [slot for slot in self.slots if slot.number >= number][:1]
        tallies = dict(same[0].tallies) if same else {}
        for name, tally in grown.items():
            tallies[name] = tallies[name] + tally if name in tallies else tally
        return (*kept, Slot(number, tallies))


def read(sample: Sample) -> dict[str, Ttft]:
    """A gateway's counters: TTFT by modality, and the gaps between tokens beside them."""
    if sample.gaps is None:
        return dict(sample.ttft)
    gaps = Ttft(sample.gaps.count, 0, 0.0, sample.gaps.buckets, {})
    return {**sample.ttft, ITL: gaps}


def growth(before: Ttft | None, now: Ttft) -> Tally | None:
    """What one gateway counted between two readings; None where nothing can be said.

    Bounds move with the target: only those that both readings share say how much was added.
    """
    if before is None:
        before = Ttft(0, 0, 0.0, dict.fromkeys(now.buckets, 0), {})
    count, missed = now.count - before.count, now.missed - before.missed
    if count <= 0 or missed < 0:
        return None
    buckets = _increments(before.buckets, now.buckets)
    if buckets is None:
        return None
    met, spent, stages = {}, {}, {}
    for name, stage in now.stages.items():
        old = before.stages.get(name)
        met[name] = max(0.0, stage.met - (old.met if old else 0.0))
        spent[name] = max(0.0, stage.missed - (old.missed if old else 0.0))
        if stage.buckets:
            old_buckets = old.buckets if old else dict.fromkeys(stage.buckets, 0)
            stages[name] = _increments(old_buckets, stage.buckets) or {}
    return Tally(count, min(missed, count), buckets, met, spent, stages)


def percentile(
    buckets: Mapping[float, int], share: float = QUANTILE, *, edges: Iterable[float] = ()
) -> float | None:
    """Interpolate a percentile inside its bucket, as Prometheus' histogram_quantile does.

    Args:
        buckets: upper bound → how many between the next lower bound and it.
        share: 0.95 for the 95th.
        edges: bounds at which none was counted.

    Returns:
        None where nothing was counted; of what lies beyond the last finite bound, that bound.
    """
    total = sum(buckets.values())
    if total <= 0:
        return None
    bounds = sorted({*buckets, *edges} - {math.inf})
    rank, below = share * total, 0
    for index, bound in enumerate(bounds):
        inside = buckets.get(bound, 0)
        if below + inside >= rank and inside:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bound - lower) * (rank - below) / inside
        below += inside
    return bounds[-1] if bounds else None


def _total(slots: Iterable[Slot], after: int) -> dict[str, Tally]:
    found: dict[str, Tally] = {}
    for slot in slots:
        if slot.number > after:
            for name, tally in slot.tallies.items():
                found[name] = found[name] + tally if name in found else tally
    return found


def _number(now: float, window: float) -> int:
    return math.floor(now * SLOTS / max(window, 1e-3))


def _increments(before: Mapping[float, int], now: Mapping[float, int]) -> dict[float, int] | None:
    """How many fell between neighbouring bounds; None where a cumulative count fell."""
    found: dict[float, int] = {}
    below = 0
    for bound in sorted(now):
        if bound in before:
            added = now[bound] - before[bound]
            if added < below:
                return None
            if added > below:
                found[bound] = added - below
            below = added
    return found


def _sum(left: Mapping[Key, Number], right: Mapping[Key, Number]) -> Mapping[Key, Number]:
    if not right:
        return left
    if not left:
        return right
    found = dict(left)
    for key, value in right.items():
        before = found.get(key)
        found[key] = value if before is None else before + value
    return found
