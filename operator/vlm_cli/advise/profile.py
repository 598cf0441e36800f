"""What a service did in a window: time by phase, steps by KV tokens, TTFT by stage. Pure.

    /stats of a pod at t0, t1, t2 …  ─▶  growth of its counters between two of them = one interval

A step's time is `base + slope · KV tokens`, fitted over the intervals of the decode pods.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from vlm_operator.names import Role
from vlm_operator.state import Sample, WorkCounters

KINDS: Final = ("encode", "prefill", "decode")
MIN_POINTS: Final = 8
"""Fewer intervals say nothing about a slope."""
MIN_SPREAD: Final = 1.2
"""Largest over smallest KV tokens of the fit's halves; below it, the load did not vary."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One `/stats` of a pod; `counters` are its counters, `at` seconds."""

    pod: str
    at: float
    sample: Sample
    counters: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class StepPoint:
    """The mean step of a pod in one interval, and the number of steps."""

    kv_tokens: float
    sequences: float
    seconds: float
    num_steps: int


@dataclasses.dataclass(frozen=True)
class StepFit:
    """Seconds of a step = base + slope · KV tokens.

    Attributes:
        kv_tokens, sequences, seconds: of the mean step.
        explained: share of the steps' variance that the line explains, 0 to 1.
        growth: slope in the upper half of the points over that in the lower half; above 1 steps
            grow faster than linearly. None if the load did not vary enough.
    """

    base: float
    slope: float
    kv_tokens: float
    sequences: float
    seconds: float
    num_points: int
    explained: float
    growth: float | None


@dataclasses.dataclass(frozen=True)
class RoleProfile:
    """Pods of a role: share of their time by phase, and of their KV in use."""

    num_pods: int
    shares: Mapping[str, float]
    kv_occupancy: float | None

    @property
    def busy(self) -> float:
        return sum(self.shares.values())


@dataclasses.dataclass(frozen=True)
class Profile:
    """A service in a window of `seconds`.

    Attributes:
        requests: that reached the gateways.
        visual_tokens: visual tokens per request, in the mean over all requests.
        stages: seconds of TTFT by stage, over all requests.
        ttft: mean seconds; None without requests.
        itl_p95: upper bound in seconds of the bucket with the 95th percentile; None without gaps.
    """

    seconds: float
    roles: Mapping[Role, RoleProfile]
    fit: StepFit | None
    requests: int
    visual_tokens: float
    stages: Mapping[str, float]
    ttft: float | None
    itl_p95: float | None


@dataclasses.dataclass(frozen=True)
class _Interval:
    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def grown(self, kind: str) -> WorkCounters:
        """Return the growth of the counters of one kind of work."""
        zero = WorkCounters(0.0, 0, 0, 0, 0.0)
        old, new = (one.sample.busy.get(kind, zero) for one in (self.before, self.after))
        return WorkCounters(
            new.seconds - old.seconds,
            new.calls - old.calls,
            new.items - old.items,
            new.units - old.units,
            new.squares - old.squares,
        )

    def counted(self, name: str) -> int:
        return self.after.counters.get(name, 0) - self.before.counters.get(name, 0)


def profile(snapshots: Iterable[Snapshot]) -> Profile:
    """Summarise snapshots of all pods; an interval with a restart of its pod is left out."""
    by_pod: dict[str, list[Snapshot]] = defaultdict(list)
    for snapshot in snapshots:
        by_pod[snapshot.pod].append(snapshot)
    intervals = [
        _Interval(before, after)
        for taken in by_pod.values()
        for before, after in pairwise(sorted(taken, key=lambda one: one.at))
        if before.sample.boot_id == after.sample.boot_id and after.at > before.at
    ]
    gateways = [one for one in intervals if one.after.sample.role is Role.GATEWAY]
    stages, ttft = _ttft(gateways)
    requests = sum(one.counted("requests") for one in gateways)
    visual = sum(one.counted("visual_tokens") for one in gateways)
    return Profile(
        seconds=max((_span(taken) for taken in by_pod.values()), default=0.0),
        roles=_roles(one for one in intervals if one.after.sample.role is not Role.GATEWAY),
        fit=fit(_points(intervals)),
        requests=requests,
        visual_tokens=visual / requests if requests else 0.0,
        stages=stages,
        ttft=ttft,
        itl_p95=_itl_p95(gateways),
    )


def fit(points: Sequence[StepPoint]) -> StepFit | None:
    """Fit the line through the points, each weighted by its steps; None with too few points.

    A slope below 0 is noise: it counts as 0.
    """
    if len(points) < MIN_POINTS:
        return None
    weights = [point.num_steps for point in points]
    kv = _mean([point.kv_tokens for point in points], weights)
    seconds = _mean([point.seconds for point in points], weights)
    slope = max(0.0, _slope(points))
    return StepFit(
        base=max(0.0, seconds - slope * kv),
        slope=slope,
        kv_tokens=kv,
        sequences=_mean([point.sequences for point in points], weights),
        seconds=seconds,
        num_points=len(points),
        explained=_explained(points, slope),
        growth=_growth(points),
    )


def _span(taken: Sequence[Snapshot]) -> float:
    times = [snapshot.at for snapshot in taken]
    return max(times) - min(times)


def _roles(intervals: Iterable[_Interval]) -> dict[Role, RoleProfile]:
    by_role: dict[Role, list[_Interval]] = defaultdict(list)
    for interval in intervals:
        by_role[interval.after.sample.role].append(interval)
    found: dict[Role, RoleProfile] = {}
    for role in (Role.ENCODER, Role.PREFILL, Role.DECODE):
        if role not in by_role:
            continue
        seconds = sum(interval.seconds for interval in by_role[role])
        work = {kind: sum(one.grown(kind).seconds for one in by_role[role]) for kind in KINDS}
        used = [
            (kv.running + kv.reserved) / kv.capacity
            for one in by_role[role]
            if (kv := one.after.sample.kv) is not None and kv.capacity
        ]
        found[role] = RoleProfile(
            num_pods=len({interval.after.pod for interval in by_role[role]}),
            shares={kind: spent / seconds for kind, spent in work.items() if spent > 0},
            kv_occupancy=statistics.fmean(used) if used else None,
        )
    return found


def _points(intervals: Iterable[_Interval]) -> list[StepPoint]:
    points = []
    for interval in intervals:
        work = interval.grown("decode")
        if work.calls > 0:
            mean = (work.units / work.calls, work.items / work.calls, work.seconds / work.calls)
            points.append(StepPoint(*mean, work.calls))
    return points


def _ttft(gateways: Iterable[_Interval]) -> tuple[dict[str, float], float | None]:
    """Return seconds by stage, and the mean TTFT."""
    stages: dict[str, float] = defaultdict(float)
    count, total = 0, 0.0
    for interval in gateways:
        for sign, snapshot in ((1, interval.after), (-1, interval.before)):
            for ttft in snapshot.sample.ttft.values():
                count += sign * ttft.count
                total += sign * ttft.sum_seconds
                for stage, spent in ttft.stages.items():
                    stages[stage] += sign * (spent.met + spent.missed)
    return dict(stages), total / count if count else None


def _itl_p95(gateways: Iterable[_Interval]) -> float | None:
    grown: dict[float, int] = defaultdict(int)
    for interval in gateways:
        for sign, snapshot in ((1, interval.after), (-1, interval.before)):
            if snapshot.sample.gaps is not None:
                for bound, count in snapshot.sample.gaps.buckets.items():
                    grown[bound] += sign * count
    total = max(grown.values(), default=0)
    if not total:
        return None
    bound = next(bound for bound in sorted(grown) if grown[bound] >= 0.95 * total)
    return None if math.isinf(bound) else bound


def _slope(points: Sequence[StepPoint]) -> float:
    """Return the slope of weighted least squares; 0 if all points have the same KV tokens."""
    weights = [point.num_steps for point in points]
    kv = _mean([point.kv_tokens for point in points], weights)
    seconds = _mean([point.seconds for point in points], weights)
    spread = sum(
        weight * (point.kv_tokens - kv) ** 2 for weight, point in zip(weights, points, strict=True)
    )
    together = sum(
        weight * (point.kv_tokens - kv) * (point.seconds - seconds)
        for weight, point in zip(weights, points, strict=True)
    )
    return together / spread if spread > 0 else 0.0


def _explained(points: Sequence[StepPoint], slope: float) -> float:
    """Return R², weighted by steps; 1 if all steps take the same time."""
    weights = [point.num_steps for point in points]
    kv = _mean([point.kv_tokens for point in points], weights)
    seconds = _mean([point.seconds for point in points], weights)
    whole = _mean([(point.seconds - seconds) ** 2 for point in points], weights)
    rest = _mean(
        [(point.seconds - seconds - slope * (point.kv_tokens - kv)) ** 2 for point in points],
        weights,
    )
    return max(0.0, 1 - rest / whole) if whole > 0 else 1.0


def _growth(points: Sequence[StepPoint]) -> float | None:
    ordered = sorted(points, key=lambda point: point.kv_tokens)
    middle = len(ordered) // 2
    halves = ordered[: middle + 1], ordered[middle:]
    if any(half[-1].kv_tokens < MIN_SPREAD * half[0].kv_tokens for half in halves):
        return None
    low, high = (_slope(half) for half in halves)
    return high / low if low > 0 else None


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
