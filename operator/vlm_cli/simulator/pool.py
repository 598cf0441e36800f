"""One simulated pool: its Deployments, one per variant, and the life cycle of their pods.

scale(variants) ─▶ new pods: wait for a node and for budget, start, serve
                ─▶ surplus pods: drain, are removed
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
from vlm_cli.simulator.pod import Lifecycle, Pod
from vlm_operator.autoscale.policy import PoolPolicy
from vlm_operator.autoscale.view import PoolView
from vlm_operator.names import MANAGER_AUTOSCALER, Role

_SETTLE_SECONDS = 2.0  # from the readiness gate's False until the last routed request arrives
MOST_SPREAD = 2.0  # a start takes from half to twice its median
PodT = TypeVar("PodT", bound=Pod)


@dataclasses.dataclass(frozen=True)
class Drains:
    """Limits of drains: seconds per drain, and concurrent drains per pool."""

    seconds: float = 600.0
    at_once: int = 1


class Predictions:
    """Random errors of the work that pods predict."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self._sigma, self._bias, self._seed = noise.prediction, noise.bias, seed
        self._pods = random.Random(f"predictions/{seed}")

    def factor(self, role: Role) -> float:
        """Return the ratio of predicted to real work for one new pod."""
        common = random.Random(f"predictions/{self._seed}/{role}").gauss(0.0, self._sigma)
        return self._bias * math.exp(common + self._pods.gauss(0.0, self._sigma / 2))


@dataclasses.dataclass(frozen=True)
class PoolContext:
    """Objects that all pools share.

    Attributes:
        fits: whether the budget allows that many more devices and that much more cost per hour.
        reroute: called with the jobs of a pod that crashed, or whose drain reached its deadline.
        accepting_changed: called after pods start or stop accepting work.
    """

    hardware: Hardware
    clock: Clock
    rng: random.Random
    drains: Drains
    fits: Callable[[int, float], bool]
    predictions: Predictions
    reroute: Callable[[list[Job], Role], None]
    accepting_changed: Callable[[], None]


class Pool(Generic[PodT]):
    """Pods of one role. Its one writer is the simulation.

    Args:
        make: creates a pod from its `Lifecycle`.
    """

    def __init__(
        self, policy: PoolPolicy, context: PoolContext, *, make: Callable[[Lifecycle], PodT]
    ) -> None:
        self.policy = policy
        self.role = policy.role
        self._context, self._clock, self._make = context, context.clock, make
        self.pods: list[PodT] = []
        self.accepting: list[PodT] = []
        self.wanted: dict[str, int] = {item.name: 0 for item in policy.variants}
        self.replicas = 0
        self._ids = itertools.count()

    def scale(self, variants: Mapping[str, int], *, replicas: int | None = None) -> None:
        """Set the replicas of each variant; a missing variant gets 0."""
        self.wanted = {name: variants.get(name, 0) for name in self.wanted}
        self.replicas = sum(self.wanted.values()) if replicas is None else replicas
        self.update_pods()

    def start_with(self, variants: Mapping[str, int]) -> None:
        """Create the initial pods, ready at once."""
        self.scale(variants)
        for pod in self.pods:
            pod.lifecycle.scheduled_since = pod.lifecycle.ready_since = self._clock.now
        self._refresh()

    def update_pods(self) -> None:
        """Create, reopen, drain and remove pods to reach the wanted replicas of each variant."""
        for name, count in self.wanted.items():
            own = [pod for pod in self.pods if pod.lifecycle.variant == name]
            kept = [pod for pod in own if pod.lifecycle.draining_since is None]
            draining = [pod for pod in own if pod.lifecycle.draining_since is not None]
            for pod in draining[: max(0, count - len(kept))]:
                pod.lifecycle.draining_since = None
                kept.append(pod)
            for _ in range(count - len(kept)):
                self._create(name)
            self._retire(kept, max(0, len(kept) - count))
        self._remove_drained()
        self._schedule()
        self._refresh()

    def crash(self) -> None:
        """Crash the oldest pod that accepts work. It loses its jobs and restarts on its node."""
        pod = min(self.accepting, key=lambda item: item.lifecycle.created, default=None)
        if pod is None:
            return
        now, lifecycle = self._clock.now, pod.lifecycle
        lifecycle.served, lifecycle.ready_since, lifecycle.unready_since = True, None, now
        lifecycle.restarts += 1
        jobs = pod.evacuate()
        self._refresh()
        self._context.reroute(jobs, self.role)
        node_type = self._context.hardware.node_type(self.role, lifecycle.variant)
        self._clock.after(self._startup(node_type), functools.partial(self._ready, pod))

    def view(self, epoch: float) -> PoolView:
        """Return the autoscaler's view; `epoch` is the Unix time of the clock's zero."""
        live = dict.fromkeys(self.wanted, 0)
        for pod in self.pods:
            live[pod.lifecycle.variant] += 1
        return PoolView(
            replicas=self.replicas,
            owner=MANAGER_AUTOSCALER,
            live=live,
            pods=tuple(pod.lifecycle.view(epoch) for pod in self.pods),
        )

    @property
    def accelerators(self) -> int:
        """Devices that its scheduled pods hold."""
        return sum(pod.lifecycle.accelerators for pod in self.pods if pod.lifecycle.scheduled)

    @property
    def cost_per_hour(self) -> float:
        """Cost of its scheduled pods."""
        return sum(pod.lifecycle.cost_per_hour for pod in self.pods if pod.lifecycle.scheduled)

    def _create(self, name: str) -> None:
        variant = next(item for item in self.policy.variants if item.name == name)
        lifecycle = Lifecycle(
            uid=f"{self.role}-{name}-{next(self._ids)}",
            role=self.role,
            variant=name,
            speed=variant.speed,
            accelerators=variant.accelerators,
            cost_per_hour=variant.cost_per_hour or 0.0,
            created=self._clock.now,
            prediction_factor=self._context.predictions.factor(self.role),
        )
        self.pods.append(self._make(lifecycle))

    def _retire(self, kept: list[PodT], excess: int) -> None:
        """Remove pending and starting pods first, then drain those with the fewest requests."""

        def order(pod: PodT) -> tuple[bool, bool, int, float]:
            lifecycle = pod.lifecycle
            return (
                lifecycle.scheduled,
                lifecycle.ready_since is not None,
                pod.inflight,
                -lifecycle.created,
            )

        draining = sum(pod.lifecycle.draining_since is not None for pod in self.pods)
        for pod in sorted(kept, key=order)[:excess]:
            if pod.lifecycle.ready_since is None:
                self._remove(pod)
            elif draining < self._context.drains.at_once:
                draining += 1
                pod.lifecycle.draining_since = self._clock.now

    def _remove_drained(self) -> None:
        now = self._clock.now
        for pod in list(self.pods):
            since = pod.lifecycle.draining_since
            if since is None:
                continue
            timed_out = now - since >= self._context.drains.seconds
            if timed_out or (now - since >= _SETTLE_SECONDS and pod.inflight == 0):
                self._remove(pod)
                if pod.inflight:
                    self._refresh()
                    self._context.reroute(pod.evacuate(), self.role)

    def _remove(self, pod: PodT) -> None:
        pod.lifecycle.removed = True
        self.pods.remove(pod)

    def _schedule(self) -> None:
        """Schedule pending pods, oldest first, while nodes and budget allow it."""
        for pod in self.pods:
            lifecycle = pod.lifecycle
            if lifecycle.scheduled:
                continue
            node_type = self._context.hardware.node_type(self.role, lifecycle.variant)
            num_scheduled = sum(
                other.lifecycle.scheduled
                for other in self.pods
                if other.lifecycle.variant == lifecycle.variant
            )
            waited = self._clock.now - lifecycle.created
            unavailable = node_type.gone_from <= self._clock.now < node_type.gone_until
            if (
                unavailable
                or num_scheduled >= node_type.nodes
                or waited < node_type.schedule_seconds
            ):
                continue
            if self._context.fits(lifecycle.accelerators, lifecycle.cost_per_hour):
                lifecycle.scheduled_since = self._clock.now
                self._clock.after(self._startup(node_type), functools.partial(self._ready, pod))

    def _startup(self, node_type: NodeType) -> float:
        factor = math.exp(self._context.rng.gauss(0.0, node_type.startup_spread))
        return node_type.startup_seconds * min(max(factor, 1 / MOST_SPREAD), MOST_SPREAD)

    def _ready(self, pod: PodT) -> None:
        if not pod.lifecycle.removed:
            pod.lifecycle.ready_since, pod.lifecycle.unready_since = self._clock.now, None
            self._refresh()

    def _refresh(self) -> None:
        """Update the list of pods that accept work; call `accepting_changed` if it changes."""
        accepting = [pod for pod in self.pods if pod.lifecycle.accepting]
        if accepting != self.accepting:
            self.accepting = accepting
            self._context.accepting_changed()
