"""Runs a trace through the simulated service; one autoscaler decides at every tick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from vlm_cli.simulator.cluster import Cluster
from vlm_cli.simulator.hardware import Hardware, Noise
from vlm_cli.simulator.job import Job
from vlm_cli.simulator.pool import Drains
from vlm_cli.simulator.trace import Trace
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role

EPOCH = 1_767_225_600.0  # 2026-01-01T00:00Z: start of simulated time
_WAKE_TICK_SECONDS = 1.0  # between two looks at a service at zero
_MAX_SECONDS_AFTER_TRACE = 3600.0  # maximum time after the trace's end, for requests in flight


@dataclasses.dataclass(frozen=True)
class Reading:
    """Input of an autoscaler.

    Attributes:
        waiting: number of requests that no pod has accepted, by the role that they wait for.
        latencies: returns each pod's p95 latency of the last minute, in seconds, by uid.
    """

    view: View
    waiting: Mapping[Role, int]
    latencies: Callable[[], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Wanted replicas of a pool's Deployments.

    Attributes:
        variants: replicas by variant.
        replicas: value of `VLMPool.spec.replicas`; None means their sum.
    """

    variants: Mapping[str, int]
    replicas: int | None = None


class Autoscaler(Protocol):
    """Decides the sizes of all pools; may keep state between calls."""

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """Return the choice for each pool; a missing pool is not changed."""
        ...


@dataclasses.dataclass(frozen=True)
class Setup:
    """The service and its hardware, the same for all compared autoscalers.

    Attributes:
        start: number of ready pods of the first variant at the start of the trace, by role.
        crashes: for each crash the time in the trace, in seconds, and the pod's role.
    """

    policy: ServicePolicy
    hardware: Hardware
    start: Mapping[Role, int]
    noise: Noise = dataclasses.field(default_factory=Noise)
    drains: Drains = dataclasses.field(default_factory=Drains)
    crashes: tuple[tuple[float, Role], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """State after one tick.

    Attributes:
        wanted, accepting: wanted replicas, and pods that accept work, by role.
        accelerators, cost_per_hour: sums over scheduled pods.
        waiting: number of requests that no pod has accepted.
    """

    at: float
    wanted: Mapping[Role, int]
    accepting: Mapping[Role, int]
    accelerators: int
    cost_per_hour: float
    waiting: int


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of a run.

    Attributes:
        seconds: length of the trace.
        jobs: every request of the trace, in the order of arrival.
        moments: one per tick, also after the trace.
        inline_images: number of images that prefill pods encoded, because no encoder pod was ready.
    """

    trace: str
    seconds: float
    jobs: tuple[Job, ...]
    moments: tuple[Moment, ...]
    inline_images: int


def simulate(setup: Setup, trace: Trace, autoscaler: Autoscaler, *, seed: int = 0) -> Run:
    """Send a trace through the service.

    Args:
        setup: the service and its hardware.
        trace: the requests.
        autoscaler: called at every tick of the policy.
        seed: seed of start times and noise; equal arguments give equal runs.
    """
    cluster = Cluster(
        setup.policy,
        setup.hardware,
        seed=seed,
        epoch=EPOCH,
        noise=setup.noise,
        drains=setup.drains,
    )
    for role, pool in cluster.pools.items():
        pool.start_with({pool.policy.variants[0].name: setup.start.get(role, 1)})
    _arrivals(cluster, trace)
    for at, role in setup.crashes:
        cluster.clock.at(at, cluster.pools[role].crash)
    moments: list[Moment] = []
    now = 0.0
    while now < trace.seconds or (
        _has_unended_job(cluster) and now < trace.seconds + _MAX_SECONDS_AFTER_TRACE
    ):
        now += _tick_seconds(setup.policy, cluster)
        cluster.clock.run(now)
        reading = Reading(cluster.view(), cluster.gateway.waiting, cluster.latencies)
        choices = autoscaler.decide(reading)
        # pools that shrink come first, which frees their devices for pools that grow
        for role in sorted(choices, key=lambda role: _growth(cluster, role, choices[role])):
            cluster.pools[role].scale(choices[role].variants, replicas=choices[role].replicas)
        cluster.update_pods()
        moments.append(_moment(cluster, now))
    return Run(
        trace=trace.name,
        seconds=trace.seconds,
        jobs=tuple(cluster.gateway.jobs),
        moments=tuple(moments),
        inline_images=cluster.gateway.inline_images,
    )


def _tick_seconds(policy: ServicePolicy, cluster: Cluster) -> float:
    """Return the seconds until the next decision; the operator looks sooner at zero."""
    at_zero = policy.sleep is not None and not any(pool.replicas for pool in cluster.pools.values())
    return min(policy.interval_seconds, _WAKE_TICK_SECONDS) if at_zero else policy.interval_seconds


def _arrivals(cluster: Cluster, trace: Trace) -> None:
    """Schedule one arrival at a time, so that the heap stays small."""
    requests = iter(trace.requests)

    def arrive_next() -> None:
        request = next(requests, None)
        if request is not None:

            def arrive() -> None:
                cluster.gateway.arrive(request)
                arrive_next()

            cluster.clock.at(request.at, arrive)

    arrive_next()


def _has_unended_job(cluster: Cluster) -> bool:
    return any(job.ended_at is None for job in reversed(cluster.gateway.jobs))


def _growth(cluster: Cluster, role: Role, choice: Choice) -> int:
    return sum(choice.variants.values()) - sum(cluster.pools[role].wanted.values())


def _moment(cluster: Cluster, now: float) -> Moment:
    return Moment(
        at=now,
        wanted={role: sum(pool.wanted.values()) for role, pool in cluster.pools.items()},
        accepting={role: len(pool.accepting) for role, pool in cluster.pools.items()},
        accelerators=cluster.accelerators,
        cost_per_hour=cluster.cost_per_hour,
        waiting=sum(cluster.gateway.waiting.values()),
    )
