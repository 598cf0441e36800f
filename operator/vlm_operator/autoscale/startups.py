"""Measures how long new pods take until they are ready, per role and variant. Pure.

start-up  p90 of (created → ready) over the last startups_kept starts; until one is measured, the
          expectation of the node class, else startup_seconds
phases    unplaced: created → on a node; loading: on a node → ready (image, weights, warm-up)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import POOL_ROLES, Role

MAX_STARTING = 1024  # pods whose start is measured at once


@dataclasses.dataclass(frozen=True)
class StartupMemory:
    """Seconds of the last starts, by "role/variant", oldest first.

    Attributes:
        starting: pods that start: uid → creation, in seconds since the epoch.
        seconds: from creation to ready.
        unplaced, loading: the two phases, of starts whose pods report when they got a node.
    """

    starting: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    unplaced: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    loading: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Phases:
    """90th percentiles of the phases of a start, in seconds."""

    unplaced: float
    loading: float


def time_startups(policy: ServicePolicy, view: View, memory: StartupMemory) -> StartupMemory:
    """Add the pods that start, and the starts that ended.

    A start ends when the pod is ready for the first time. A container that restarts is not a start
    of its pod.
    """
    starting: dict[str, float] = {}
    parts = [dict(memory.seconds), dict(memory.unplaced), dict(memory.loading)]
    pools = [(role, view.pools[role]) for role in POOL_ROLES if role in view.pools]
    for role, pod in [(role, pod) for role, pool in pools for pod in pool.pods]:
        if pod.phase in ("pending", "starting"):
            restarted = pod.served and pod.uid not in memory.starting
            if not restarted and len(starting) < MAX_STARTING:
                starting[pod.uid] = pod.created
        elif pod.phase == "ready" and pod.uid in memory.starting:
            end = view.now if pod.ready_since is None else pod.ready_since
            took = [end - pod.created]
            if pod.scheduled_since is not None:
                took += [pod.scheduled_since - pod.created, end - pod.scheduled_since]
            key = f"{role}/{pod.variant}"
            for part, seconds in zip(parts, took, strict=False):
                if seconds >= 0:  # clocks may differ
                    part[key] = (*part.get(key, ()), seconds)[-policy.constants.startups_kept :]
    return StartupMemory(starting, *parts)


def startup_seconds(policy: ServicePolicy, memory: StartupMemory) -> dict[tuple[Role, str], float]:
    """Return the seconds of a start, by role and variant."""
    found = {}
    for role, pool in policy.pools.items():
        for variant in pool.variants:
            expected = variant.startup_seconds
            if expected is None:
                expected = policy.constants.startup_seconds
            measured = memory.seconds.get(f"{role}/{variant.name}")
            found[role, variant.name] = percentile_90(measured) if measured else expected
    return found


def startup_phases(memory: StartupMemory) -> dict[tuple[Role, str], Phases]:
    """Return the phases of a start, by role and variant, as far as they were measured."""
    found = {}
    for key, unplaced in memory.unplaced.items():
        role, _, variant = key.partition("/")
        loading = memory.loading.get(key)
        if unplaced and loading and role in POOL_ROLES:
            found[Role(role), variant] = Phases(percentile_90(unplaced), percentile_90(loading))
    return found


def percentile_90(values: Sequence[float]) -> float:
    """Return the 90th percentile; between two values, the greater."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]
