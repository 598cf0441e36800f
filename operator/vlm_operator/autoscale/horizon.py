"""How long a new replica takes, and how much work there will be by then. Pure.

start-up   p90 of (pod created → ready) over the last 20 of a role and variant; before that what the
           node class expects, before that the default
phases     of the same starts: created → on a node, and on a node → ready (image, weights, warm-up)
plan       a_plan = a + slope⁺ · (start-up + smoothing)
slope⁺     Theil-Sen over the last minute, where three quarters of all pairs rise; what chance may
           have made of it apart, and at most growth_cap · a within one start-up
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
    kept = policy.constants.startups_kept
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
                found[role, variant.name] = percentile_90(measured)
            elif variant.startup_seconds is not None and math.isfinite(variant.startup_seconds):
                found[role, variant.name] = max(0.0, variant.startup_seconds)
            else:
                found[role, variant.name] = policy.constants.startup_seconds
    return found


def startup_phases(memory: StartupMemory) -> dict[tuple[Role, str], Phases]:
    """The same by phase, of variants whose starts were seen."""
    found = {}
    for key, unplaced in memory.unplaced.items():
        role, _, variant = key.partition("/")
        loading = memory.loading.get(key)
        if unplaced and loading and role in POOL_ROLES:
            found[Role(role), variant] = Phases(percentile_90(unplaced), percentile_90(loading))
    return found


def percentile_90(values: Sequence[float]) -> float:
    """The 90th percentile, the greater neighbour where it lies between two."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def planned(
    policy: ServicePolicy,
    load: float,
    trend: Sequence[tuple[float, float]],
    *,
    startup: float,
    chance: float = 0.0,
) -> float:
    """The load at the end of a start-up, by the slope of `trend`.

    `chance` is by how much load may seem to rise within `startup` though it does not.
    """
    rise = max(0.0, rising_slope(trend) * startup - chance)
    return load + min(rise, policy.constants.growth_cap * load)


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
