"""One simulated pool: its Deployments, one per variant, and the life cycle of their pods.

scale(variants) ─▶ new pods wait for a node and for budget, start, serve; surplus pods drain, end
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from vlm_cli.simulator.hardware import Hardware, NodeType, Noise
from vlm_cli.simulator.job import Clock, Job
from vlm_cli.simulator.pods import Life, Pod
from vlm_operator.autoscale.policy import PoolPolicy
from vlm_operator.autoscale.view import PoolView
from vlm_operator.names import MANAGER_AUTOSCALER, Role

_SETTLE_SECONDS = 2.0  # from the closed gate until the last routed request has arrived
MOST_SPREAD = 2.0  # a start takes between half and twice its median
Kind = TypeVar("Kind", bound=Pod)


@dataclasses.dataclass(frozen=True)
class Drains:
    """Limits of drains: seconds per drain, and concurrent drains per pool."""

    seconds: float = 600.0
    at_once: int = 1


class Predictions:
    """Random errors of the pods' predictions of their work."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self._sigma, self._bias, self._seed = noise.prediction, noise.bias, seed
        self._pods = random.Random(f"predictions/{seed}")

    def factor(self, role: Role) -> float:
        """Return the factor of predicted over real work for one new pod."""
        common = random.Random(f"predictions/{self._seed}/{role}").gauss(0.0, self._sigma)
        return self._bias * math.exp(common + self._pods.gauss(0.0, self._sigma / 2))


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Objects that all pools share.

    Attributes:
        fits: whether the budget allows that many more devices and that much more cost per hour.
        moved: gets the jobs of a pod that crashed, or whose drain reached its deadline.
        changed: called when pods start or stop to accept work.
    """

    hardware: Hardware
    clock: Clock
    rng: random.Random
    drains: Drains
    fits: Callable[[int, float], bool]
    predictions: Predictions
    moved: Callable[[list[Job], Role], None]
    changed: Callable[[], None]


class Pool(Generic[Kind]):
    """Pods of one role. Its one writer is the simulation.

    Args:
        make: creates a pod from its `Life`.
    """

    def __init__(
        self, policy: PoolPolicy, around: Surroundings, *, make: Callable[[Life], Kind]
    ) -> None:
        self.policy = policy
        self.role = policy.role
        self._around, self._clock, self._make = around, around.clock, make
        self.pods: list[Kind] = []
        self.taking: list[Kind] = []
        self.wanted: dict[str, int] = {item.name: 0 for item in policy.variants}
        self.claim = 0
        self._ids = itertools.count()

    def scale(self, variants: Mapping[str, int], *, claim: int | None = None) -> None:
        """Set the replicas of each variant; a missing variant gets 0."""
        self.wanted = {name: variants.get(name, 0) for name in self.wanted}
        self.claim = sum(self.wanted.values()) if claim is None else claim
        self.update_pods()

    def start_with(self, variants: Mapping[str, int]) -> None:
        """Create the initial pods, ready at once."""
        self.scale(variants)
        for pod in self.pods:
            pod.life.scheduled_since = pod.life.ready_since = self._clock.now
        self._refresh()

    def update_pods(self) -> None:
        """Create, reopen, drain and remove pods to reach the wanted replicas of each variant."""
        for name, count in self.wanted.items():
            own = [pod for pod in self.pods if pod.life.variant == name]
            staying = [pod for pod in own if pod.life.draining_since is None]
            leaving = [pod for pod in own if pod.life.draining_since is not None]
            for pod in leaving[: max(0, count - len(staying))]:
                pod.life.draining_since = None
                staying.append(pod)
            for _ in range(count - len(staying)):
                self._create(name)
            self._retire(staying, max(0, len(staying) - count))
        self._remove_drained()
        self._schedule()
        self._refresh()

    def crash(self) -> None:
        """Crash the oldest pod that accepts work: it loses its jobs and restarts on its node."""
        pod = min(self.taking, key=lambda item: item.life.created, default=None)
        if pod is None:
            return
        now, life = self._clock.now, pod.life
        life.served, life.ready_since, life.unready_since = True, None, now
        life.boots += 1
        jobs = pod.evacuate(now)
        self._refresh()
        self._around.moved(jobs, self.role)
        kind = self._around.hardware.node_type(self.role, life.variant)
        self._clock.after(self._startup(kind), functools.partial(self._ready, pod))

    def view(self, epoch: float) -> PoolView:
        """Return the autoscaler's view; `epoch` is the clock's zero in seconds since the epoch."""
        live = dict.fromkeys(self.wanted, 0)
        for pod in self.pods:
            live[pod.life.variant] += 1
        return PoolView(
            replicas=self.claim,
            owner=MANAGER_AUTOSCALER,
            live=live,
            pods=tuple(pod.life.view(epoch) for pod in self.pods),
        )

    @property
    def accelerators(self) -> int:
        """Devices that its scheduled pods hold."""
        return sum(pod.life.accelerators for pod in self.pods if pod.life.scheduled)

    @property
    def cost_per_hour(self) -> float:
        """Cost of its scheduled pods."""
        return sum(pod.life.cost_per_hour for pod in self.pods if pod.life.scheduled)

    def _create(self, name: str) -> None:
        variant = next(item for item in self.policy.variants if item.name == name)
        life = Life(
            uid=f"{self.role}-{name}-{next(self._ids)}",
            role=self.role,
            variant=name,
            speed=variant.speed,
            accelerators=variant.accelerators,
            cost_per_hour=variant.cost_per_hour or 0.0,
            created=self._clock.now,
            predicted=self._around.predictions.factor(self.role),
        )
        self.pods.append(self._make(life))

    def _retire(self, staying: list[Kind], excess: int) -> None:
        """Remove pods that are pending or starting first, then drain the least busy ones."""

        def order(pod: Kind) -> tuple[bool, bool, int, float]:
            life = pod.life
            return (life.scheduled, life.ready_since is not None, pod.inflight, -life.created)

        draining = sum(pod.life.draining_since is not None for pod in self.pods)
        for pod in sorted(staying, key=order)[:excess]:
            if pod.life.ready_since is None:
                self._remove(pod)
            elif draining < self._around.drains.at_once:
                draining += 1
                pod.life.draining_since = self._clock.now

    def _remove_drained(self) -> None:
        now = self._clock.now
        for pod in list(self.pods):
            since = pod.life.draining_since
            if since is None:
                continue
            late = now - since >= self._around.drains.seconds
            if late or (now - since >= _SETTLE_SECONDS and pod.inflight == 0):
                self._remove(pod)
                if pod.inflight:
                    self._refresh()
                    self._around.moved(pod.evacuate(now), self.role)

    def _remove(self, pod: Kind) -> None:
        pod.life.gone = True
        self.pods.remove(pod)

    def _schedule(self) -> None:
        """Schedule pending pods, oldest first, while nodes and budget allow it."""
        for pod in self.pods:
            life = pod.life
            if life.scheduled:
                continue
            kind = self._around.hardware.node_type(self.role, life.variant)
            placed = sum(
                other.life.scheduled for other in self.pods if other.life.variant == life.variant
            )
            waited = self._clock.now - life.created
            gone = kind.gone_from <= self._clock.now < kind.gone_until
            if gone or placed >= kind.nodes or waited < kind.schedule_seconds:
                continue
            if self._around.fits(life.accelerators, life.cost_per_hour):
                life.scheduled_since = self._clock.now
                self._clock.after(self._startup(kind), functools.partial(self._ready, pod))

    def _startup(self, kind: NodeType) -> float:
        factor = math.exp(self._around.rng.gauss(0.0, kind.startup_spread))
        return kind.startup_seconds * min(max(factor, 1 / MOST_SPREAD), MOST_SPREAD)

    def _ready(self, pod: Kind) -> None:
        if not pod.life.gone:
            pod.life.ready_since, pod.life.unready_since = self._clock.now, None
            self._refresh()

    def _refresh(self) -> None:
        """Update the list of pods that accept work; call `changed` if it differs."""
        taking = [pod for pod in self.pods if pod.life.accepting]
        if taking != self.taking:
            self.taking = taking
            self._around.changed()
