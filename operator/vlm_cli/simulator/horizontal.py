"""The HorizontalPodAutoscaler's arithmetic (autoscaling/v2, defaults of Kubernetes 1.34).

every 15 s:  ratio ─▶ tolerance 0.1 ─▶ ceil ─▶ greatest of the last 300 s when shrinking
             ─▶ at most max(+4, +100 %) in 15 s when growing ─▶ min, max
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
UP_PODS, UP_SHARE = 4, 1.0  # in each sync period
GRID = dict[str, tuple[Any, ...]]


@dataclasses.dataclass
class Horizontal:
    """One HPA. `stabilize` is its only writer.

    Attributes:
        down_seconds: stabilisation when shrinking.
    """

    policy: PoolPolicy
    down_seconds: float = 300.0
    _advised: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def stabilize(self, now: float, current: int, advised: int) -> int:
        """Return the replicas for one recommendation; the first call returns the current number."""
        if not self._advised:
            self._advised = [(now, current)]
        recent = [(at, count) for at, count in self._advised if now - at < self.down_seconds]
        self._advised = [*recent, (now, advised)]
        wanted = advised
        if advised < current:
            wanted = min(current, max(count for _, count in self._advised))
        elif advised > current:
            wanted = min(advised, max(current + UP_PODS, math.floor(current * (1 + UP_SHARE))))
        return bounded(self.policy, wanted)


@dataclasses.dataclass(frozen=True)
class Stabilized:
    """One decision of an HPA, in replicas: the current, the metric's and the decided number."""

    policy: PoolPolicy
    current: int
    advised: int
    count: int


class Hpas:
    """One HPA for each pool, evaluated at a fixed interval. Only `ask` changes it."""

    def __init__(
        self, policy: ServicePolicy, *, down_seconds: float, every: float = SYNC_SECONDS
    ) -> None:
        self._hpas = {role: Horizontal(pool, down_seconds) for role, pool in policy.pools.items()}
        self._every, self._next = every, 0.0

    def ask(self, reading: Reading, advise: Callable[[Role, int], int]) -> dict[Role, Stabilized]:
        """Evaluate each pool's metric `advise(role, current)`, if the interval has passed."""
        now = reading.view.now
        if now < self._next:
            return {}
        self._next = now + self._every
        found = {}
        for role, hpa in self._hpas.items():
            current = current_of(reading, role)
            advised = advise(role, current)
            count = hpa.stabilize(now, current, advised)
            found[role] = Stabilized(hpa.policy, current, advised, count)
        return found

    def decide(self, reading: Reading, advise: Callable[[Role, int], int]) -> Mapping[Role, Choice]:
        """Like `ask`, but returns the choices."""
        return {
            role: choose(item.policy, item.count)
            for role, item in self.ask(reading, advise).items()
        }


def bounded(policy: PoolPolicy, count: int) -> int:
    """Limit to min and max, and to at least 1: an HPA does not scale to zero."""
    return min(max(count, policy.minimum, 1), policy.maximum)


def by_total(total: float, target: float, current: int) -> int:
    """An external metric of type AverageValue: `total` over all pods, `target` for each."""
    ratio = total / (target * max(1, current))
    if abs(ratio - 1) <= TOLERANCE:
        return current
    return math.ceil(total / target - 1e-9)


def by_pods(values: Mapping[str, float], target: float, pool: PoolView, current: int) -> int:
    """A metric of type Pods: the mean over ready pods.

    Pods without a value count as 0 if the pool would grow, and as the target if it would shrink.
    If that reverses the direction, nothing changes. When growing, pods that are not ready count
    as 0.
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
        again = sum(known) / count / target
        if again <= 1 + TOLERANCE:
            return current
        return max(current, math.ceil(again * count - 1e-9))
    count = len(known) + missing
    again = (sum(known) + missing * target) / count / target
    if again >= 1 - TOLERANCE:
        return current
    return min(current, math.ceil(again * count - 1e-9))


def choose(policy: PoolPolicy, count: int) -> Choice:
    """Put all replicas on the first variant."""
    return Choice({policy.variants[0].name: count})


def current_of(reading: Reading, role: Role) -> int:
    """The number of replicas that the pool is set to."""
    return reading.view.pools[role].replicas or 0


def inflight(reading: Reading, role: Role) -> float:
    """Requests at the pods of a role, and requests that wait for such a pod."""
    return _sum(reading, role, "inflight") + reading.waiting.get(role, 0)


def queued(reading: Reading, role: Role) -> float:
    """Requests that wait at the pods of a role, or for such a pod."""
    return _sum(reading, role, "queued_requests") + reading.waiting.get(role, 0)


def kv_shares(reading: Reading, role: Role) -> dict[str, float]:
    """KV occupancy of each ready pod, 0..1."""
    found = {}
    for pod in reading.view.pools[role].of("ready"):
        sample = reading.view.samples.get(pod.uid)
        if sample is not None and sample.kv is not None and sample.kv.capacity:
            found[pod.uid] = (sample.kv.running + sample.kv.reserved) / sample.kv.capacity
    return found


def _sum(reading: Reading, role: Role, field: str) -> float:
    pods = reading.view.pools[role].pods
    samples = (reading.view.samples.get(pod.uid) for pod in pods)
    return float(sum(getattr(sample, field) for sample in samples if sample is not None))
