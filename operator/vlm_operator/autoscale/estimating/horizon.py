"""How long a new replica takes, and how much work there will be by then. Pure.

start-up   p90 of (pod created → ready) over the last 20 of a role and variant; before that what the
           node class expects, before that the default
phases     of the same starts: created → on a node, and on a node → ready (image, weights, warm-up)
plan       a_plan = max(a + warm, a + slope⁺ · start-up, season(now + start-up))
slope⁺     Theil-Sen over the last minute, where three quarters of all pairs rise; what chance may
           have made of it apart, and at most growth_cap · a within one start-up
warm       warm_share · p95 of what load grew by within a start-up, over two hours; of pools whose
           start-up outlasts what the target forgives: a twentieth of the window
season     multiplicative Holt-Winters without a trend, one value for each hour of the day, known
           after forecast_seconds, and of the week, known after two; a floor, never a reason to
           shrink
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import PodView, View
from vlm_operator.names import POOL_ROLES, Role

RISING_SHARE = 0.75  # of pairs of points that must rise before a slope is one
LEAST_POINTS = 5
MAX_STARTING = 1024  # pods whose start is timed at once
MINUTE = 60.0
GROWTH_MINUTES = 120  # that are kept
LEAST_MINUTES = 20  # before a percentile of them is one
FORGIVEN = 0.05  # of a window, that a target of the 95th percentile forgives
HOURS = 24
WEEK = 7 * HOURS
SEASON_WEIGHT = 0.5  # of the newest day
LEVEL_WEIGHT = 0.3  # of the newest hour
LEVEL_MOST = 2.0
DIGITS = 4  # that a season is remembered with


@dataclasses.dataclass(frozen=True)
class StartupMemory:
    """Starts that are timed, and those that were, by "role/variant".

    Attributes:
        starting: uid → created.
        seconds: from creation to ready.
        unplaced: of these, until the pod was on a node; of starts whose pods say when that was.
        loading: the rest of them: image, weights, warm-up.
    """

    starting: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    unplaced: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    loading: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Phases:
    """How long starts of a variant take by phase, in seconds: nine of ten are faster.

    Attributes:
        unplaced: until the pod is on a node.
        loading: from there until it is ready.
    """

    unplaced: float
    loading: float


@dataclasses.dataclass(frozen=True)
class SeasonMemory:
    """The load of each hour of the day and of the week.

    Attributes:
        hour: since the epoch, of the sums that are still growing.
        total, ticks: of this hour so far.
        season, week: mean load by hour of the day, of the week; None where it was never seen.
        level: today's load relative to what the hour usually brings.
        since: hour since the epoch in which the first load came.
    """

    hour: int | None = None
    total: float = 0.0
    ticks: int = 0
    season: tuple[float | None, ...] = (None,) * HOURS
    week: tuple[float | None, ...] = (None,) * WEEK
    level: float = 1.0
    since: int | None = None

    def usual(self, hour: int) -> float | None:
        """What an hour since the epoch usually brings, None where that was never seen."""
        weeks = 0 if self.since is None else (hour - self.since) // WEEK
        of_week = self.week[hour % WEEK]
        return of_week if weeks >= 2 and of_week is not None else self.season[hour % HOURS]


@dataclasses.dataclass(frozen=True)
class GrowthMemory:
    """The load at the first tick of each of the last minutes, oldest first; `minute` is the last's.

    A minute in which nothing was known has the load of the one before it.
    """

    minute: int | None = None
    loads: tuple[float, ...] = ()


def time_startups(policy: ServicePolicy, view: View, memory: StartupMemory) -> StartupMemory:
    """Note pods that start, and how long it took those that now are ready."""
    starting: dict[str, float] = {}
    ended: list[tuple[str, PodView, float]] = []
    for role in POOL_ROLES:
        pool = view.pools.get(role)
        for pod in pool.pods if pool is not None else ():
            if pod.phase in ("pending", "starting"):
                if pod.served and pod.uid not in memory.starting:
                    continue  # a container that starts again is no start of a pod
                if len(starting) < MAX_STARTING:
                    starting[pod.uid] = pod.created
            elif pod.phase == "ready" and pod.uid in memory.starting:
                # a gate that flaps would count again: only the first time is a start
                end = pod.ready_since if pod.ready_since is not None else view.now
                ended.append((f"{role}/{pod.variant}", pod, end))
    if not ended:
        return memory if starting == memory.starting else _starting(memory, starting)
    kept = policy.tuning.startups_kept
    seconds, unplaced, loading = dict(memory.seconds), dict(memory.unplaced), dict(memory.loading)
    for key, pod, end in ended:
        _keep(seconds, key, end - pod.created, kept)
        if pod.scheduled_since is not None:
            _keep(unplaced, key, pod.scheduled_since - pod.created, kept)
            _keep(loading, key, end - pod.scheduled_since, kept)
    return StartupMemory(starting, seconds, unplaced, loading)


def _starting(memory: StartupMemory, starting: Mapping[str, float]) -> StartupMemory:
    return dataclasses.replace(memory, starting=starting)


def _keep(known: dict[str, tuple[float, ...]], key: str, took: float, most: int) -> None:
    if math.isfinite(took) and took >= 0:
        known[key] = (*known.get(key, ()), took)[-most:]


def startup_seconds(policy: ServicePolicy, memory: StartupMemory) -> dict[tuple[Role, str], float]:
    """How long a start takes, by role and variant: nine of ten are faster."""
    found = {}
    for role, pool in policy.pools.items():
        for variant in pool.variants:
            measured = memory.seconds.get(f"{role}/{variant.name}")
            if measured:
                found[role, variant.name] = ninth_tenth(measured)
            elif variant.startup_seconds is not None and math.isfinite(variant.startup_seconds):
                found[role, variant.name] = max(0.0, variant.startup_seconds)
            else:
                found[role, variant.name] = policy.tuning.startup_seconds
    return found


def startup_phases(memory: StartupMemory) -> dict[tuple[Role, str], Phases]:
    """The same by phase, of variants whose starts were seen."""
    found = {}
    for key, unplaced in memory.unplaced.items():
        role, _, variant = key.partition("/")
        loading = memory.loading.get(key)
        if unplaced and loading and role in POOL_ROLES:
            found[Role(role), variant] = Phases(ninth_tenth(unplaced), ninth_tenth(loading))
    return found


def ninth_tenth(values: Sequence[float]) -> float:
    """The 90th percentile, the greater neighbour where it lies between two."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def planned(
    policy: ServicePolicy,
    load: float,
    trend: Sequence[tuple[float, float]],
    season: SeasonMemory,
    *,
    startup: float,
    now: float,
    warm: float = 0.0,
    chance: float = 0.0,
) -> float:
    """The load to plan for: of the slope, of a usual rise, or of the same hour on other days.

    `chance` is by how much load may seem to rise within `startup` though it does not.
    """
    rise = max(0.0, rising_slope(trend) * startup - chance)
    rise = min(rise, policy.tuning.growth_cap * load)
    return max(load + warm, load + rise, forecast(policy, season, now + startup))


def with_minute(memory: GrowthMemory, load: float, *, now: float) -> GrowthMemory:
    """Add one tick; only the first of a minute counts."""
    minute = int(now // MINUTE)
    if memory.minute is None or minute < memory.minute:
        return GrowthMemory(minute, (load,))  # the first ever, or the clock was put back
    if minute == memory.minute:
        return memory
    unknown = memory.loads[-1:] * min(minute - memory.minute - 1, GROWTH_MINUTES)
    return GrowthMemory(minute, (*memory.loads, *unknown, load)[-GROWTH_MINUTES:])


def warm_load(policy: ServicePolicy, memory: GrowthMemory, *, startup: float) -> float:
    """What load usually does not grow by beyond, until a replica that starts now is ready."""
    share, loads = policy.tuning.warm_share, memory.loads
    if share <= 0 or startup <= FORGIVEN * policy.window_seconds:
        return 0.0
    ahead = max(1, math.ceil(startup / MINUTE))
    rises = sorted(
        max(0.0, later - earlier)
        for earlier, later in zip(loads[:-ahead], loads[ahead:], strict=True)
    )
    if len(rises) < LEAST_MINUTES:
        return 0.0
    usual = rises[math.ceil(0.95 * len(rises)) - 1]
    return share * usual * min(1.0, startup / MINUTE)


def rising_slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen's slope a second; 0 where it does not clearly rise."""
    if len(points) < LEAST_POINTS:
        return 0.0
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
        if later[0] > earlier[0]
    ]
    if not slopes or sum(slope > 0 for slope in slopes) < RISING_SHARE * len(slopes):
        return 0.0
    return max(0.0, statistics.median(slopes))


def with_hour(memory: SeasonMemory, load: float, *, now: float) -> SeasonMemory:
    """Add one tick; an hour that is over becomes part of the season."""
    hour = int(now // 3600)
    if memory.hour == hour:
        return dataclasses.replace(memory, total=memory.total + load, ticks=memory.ticks + 1)
    if memory.hour is None or memory.ticks == 0:
        return dataclasses.replace(memory, hour=hour, total=load, ticks=1)
    mean, ended, level = memory.total / memory.ticks, memory.hour, memory.level
    before = memory.usual(ended)
    if not mean and not before:  # nothing came, as ever: an idle service learns nothing
        return dataclasses.replace(memory, hour=hour, total=load, ticks=1)
    season = _learnt(memory.season, ended, mean, level)
    week = _learnt(memory.week, ended, mean, level)
    if before:
        ratio = min(mean / before, LEVEL_MOST)
        level = level + LEVEL_WEIGHT * (ratio - level)
    since = ended if memory.since is None else memory.since
    return SeasonMemory(hour, load, 1, season, week, round(level, DIGITS), since)


def _learnt(
    values: tuple[float | None, ...], hour: int, mean: float, level: float
) -> tuple[float | None, ...]:
    """The same season, with one more hour in it."""
    slot = hour % len(values)
    before = values[slot]
    value = mean if before is None else before + SEASON_WEIGHT * (mean / _level(level) - before)
    return (*values[:slot], round(value, DIGITS), *values[slot + 1 :])


def forecast(policy: ServicePolicy, memory: SeasonMemory, when: float) -> float:
    """What the hour of `when` brought on other days, at today's level; 0 before enough days."""
    if memory.since is None or when - 3600 * memory.since < policy.tuning.forecast_seconds:
        return 0.0
    found = memory.usual(int(when // 3600))
    return 0.0 if found is None else found * memory.level


def _level(level: float) -> float:
    return max(level, 1.0 / LEVEL_MOST)
