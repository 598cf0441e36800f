"""The HorizontalPodAutoscaler's arithmetic (autoscaling/v2, defaults of Kubernetes 1.34).

every 15 s:  ratio ─▶ tolerance 0.1 ─▶ ceil
             ─▶ scale down: maximum of the last 300 s    scale up: at most max(+4, +100 %) in 15 s
             ─▶ min, max
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PoolView
from vlm_operator.names import Role

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
UP_PODS, UP_SHARE = 4, 1.0  # per sync period
GRID = dict[str, tuple[Any, ...]]


@dataclasses.dataclass
class HPA:
    """One HPA. `stabilize` is its only writer.

    Attributes:
        down_seconds: stabilization window of scale-down.
    """

    policy: PoolPolicy
    down_seconds: float = 300.0
    _recommendations: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def stabilize(self, now: float, current: int, recommended: int) -> int:
        """Return the replicas for one recommendation; the first call returns the current number."""
        if not self._recommendations:
            self._recommendations = [(now, current)]
        recent = [
            (at, count) for at, count in self._recommendations if now - at < self.down_seconds
        ]
        self._recommendations = [*recent, (now, recommended)]
        wanted = recommended
        if recommended < current:
            wanted = min(current, max(count for _, count in self._recommendations))
        elif recommended > current:
            wanted = min(recommended, max(current + UP_PODS, math.floor(current * (1 + UP_SHARE))))
        return clamped(self.policy, wanted)


@dataclasses.dataclass(frozen=True)
class Stabilized:
    """One decision of an HPA, in replicas: `recommended` by the metric, `count` after all rules."""

    policy: PoolPolicy
    current: int
    recommended: int
    count: int


class HPAs:
    """One HPA for each pool, evaluated at a fixed interval. Only `evaluate` changes it."""

    def __init__(
        self, policy: ServicePolicy, *, down_seconds: float, every: float = SYNC_SECONDS
    ) -> None:
        self._hpas = {role: HPA(pool, down_seconds) for role, pool in policy.pools.items()}
        self._every, self._next = every, 0.0

    def evaluate(
        self, reading: Reading, recommend: Callable[[Role, int], int]
    ) -> dict[Role, Stabilized]:
        """Evaluate each pool's metric `recommend(role, current)`, if the interval has passed."""
        now = reading.view.now
        if now < self._next:
            return {}
        self._next = now + self._every
        decisions = {}
        for role, hpa in self._hpas.items():
            current = current_of(reading, role)
            recommended = recommend(role, current)
            count = hpa.stabilize(now, current, recommended)
            decisions[role] = Stabilized(hpa.policy, current, recommended, count)
        return decisions

    def decide(
        self, reading: Reading, recommend: Callable[[Role, int], int]
    ) -> Mapping[Role, Choice]:
        """Like `evaluate`, but returns the choices."""
        return {
            role: choose(item.policy, item.count)
            for role, item in self.evaluate(reading, recommend).items()
        }


def clamped(policy: PoolPolicy, count: int) -> int:
    """Limit to min and max, and to at least 1: an HPA does not scale to zero."""
    return min(max(count, policy.minimum, 1), policy.maximum)


def by_total(total: float, target: float, current: int) -> int:
    """Return the replicas for an external metric: `total` of all pods, AverageValue `target`."""
    ratio = total / (target * max(1, current))
    if abs(ratio - 1) <= TOLERANCE:
        return current
    return math.ceil(total / target - 1e-9)


def by_pods(values: Mapping[str, float], target: float, pool: PoolView, current: int) -> int:
    """Return the replicas for a metric of type Pods: the mean over ready pods against `target`.

    For a scale-up, pods without a value and pods that are not ready count as 0. For a scale-down,
    pods without a value count as the target. If that reverses the direction, nothing changes.
    """
    ready = pool.of("ready")
    known = [values[pod.uid] for pod in ready if pod.uid in values]
    if not known:
        return current
    ratio = sum(known) / len(known) / target
    missing = len(ready) - len(known)
    starting = len(pool.of("starting")) + len(pool.of("pending"))
    if abs(ratio - 1) <= TOLERANCE:
        return current
    if ratio > 1:
        count = len(known) + missing + starting
        ratio_with_missing = sum(known) / count / target
        if ratio_with_missing <= 1 + TOLERANCE:
            return current
        return max(current, math.ceil(ratio_with_missing * count - 1e-9))
    count = len(known) + missing
    ratio_with_missing = (sum(known) + missing * target) / count / target
    if ratio_with_missing >= 1 - TOLERANCE:
        return current
    return min(current, math.ceil(ratio_with_missing * count - 1e-9))


def choose(policy: PoolPolicy, count: int) -> Choice:
    """Choose the first variant for all replicas."""
    return Choice({policy.variants[0].name: count})


def current_of(reading: Reading, role: Role) -> int:
    """Return `spec.replicas` of the pool."""
    return reading.view.pools[role].replicas or 0


def inflight(reading: Reading, role: Role) -> float:
    """Return the number of requests at the pods of a role or waiting for such a pod."""
    return _sum(reading, role, "inflight") + reading.waiting.get(role, 0)


def queued(reading: Reading, role: Role) -> float:
    """Return the number of requests that wait at the pods of a role or for such a pod."""
    return _sum(reading, role, "queued_requests") + reading.waiting.get(role, 0)


def kv_occupancies(reading: Reading, role: Role) -> dict[str, float]:
    """Return the KV occupancy of each ready pod, 0..1, by uid."""
    occupancies = {}
    for pod in reading.view.pools[role].of("ready"):
        sample = reading.view.samples.get(pod.uid)
        if sample is not None and sample.kv is not None and sample.kv.capacity:
            occupancies[pod.uid] = (sample.kv.running + sample.kv.reserved) / sample.kv.capacity
    return occupancies


def _sum(reading: Reading, role: Role, field: str) -> float:
    pods = reading.view.pools[role].pods
    samples = (reading.view.samples.get(pod.uid) for pod in pods)
    return float(sum(getattr(sample, field) for sample in samples if sample is not None))
