"""One run: a trace through the simulated service, under one autoscaler, tick by tick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role
from vlm_operator.simulate.cluster import Cluster
from vlm_operator.simulate.job import Job
from vlm_operator.simulate.noise import Noise
from vlm_operator.simulate.plant import Plant
from vlm_operator.simulate.pool import Drains
from vlm_operator.simulate.trace import Trace

EPOCH = 1_767_225_600.0  # 2026-01-01: where simulated time begins
_OVERTIME_SECONDS = 3600.0  # after the last arrival, for what is still under way


@dataclasses.dataclass(frozen=True)
class Reading:
    """What an autoscaler may look at.

    Attributes:
        waiting: requests that no pod has taken, by the role that they wait for.
        latencies: each pod's own 95th percentile over the last minute, by uid.
    """

    view: View
    waiting: Mapping[Role, int]
    latencies: Callable[[], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a pool's Deployments should be now.

    Attributes:
        variants: replicas by node type.
        claim: what `VLMPool.spec.replicas` says; None: their sum.
        decision: the record, where the autoscaler keeps one.
    """

    variants: Mapping[str, int]
    claim: int | None = None
    decision: Decision | None = None


class Autoscaler(Protocol):
    """Decides for all pools at once; may remember what it saw."""

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """Choose, pool by pool; a pool that is missing stays as it is."""
        ...


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that is the same for all autoscalers that are compared.

    Attributes:
        start: ready pods of each pool when the trace begins, of its first variant.
    """

    policy: ServicePolicy
    plant: Plant
    start: Mapping[Role, int]
    noise: Noise = dataclasses.field(default_factory=Noise)
    drains: Drains = dataclasses.field(default_factory=Drains)


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """How things stood after one tick.

    Attributes:
        wanted, taking: replicas asked for, and those that take work, by role.
        accelerators, cost_per_hour: held by all pods on nodes.
        waiting: requests without a first token.
    """

    at: float
    wanted: Mapping[Role, int]
    taking: Mapping[Role, int]
    accelerators: int
    cost_per_hour: float
    waiting: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of it.

    Attributes:
        seconds: how long the trace was.
        jobs: every request of the trace, in the order of arrival.
        moments: one per tick, overtime included.
        gaps: counts of times between tokens, by `decoder.GAP_BUCKETS`.
        inline_pictures: encoded at prefill, for want of an encoder.
    """

    trace: str
    seconds: float
    jobs: tuple[Job, ...]
    moments: tuple[Moment, ...]
    gaps: tuple[float, ...]
    inline_pictures: int


def simulate(setup: Setup, trace: Trace, autoscaler: Autoscaler, *, seed: int = 0) -> Run:
    """Send a trace through the service.

    Args:
        setup: the service and its hardware.
        trace: what users send.
        autoscaler: asked at every tick of the policy.
        seed: of start-up times and noise; same arguments, same run.
    """
    cluster = Cluster(
        setup.policy,
        setup.plant,
        seed=seed,
        epoch=EPOCH,
        noise=setup.noise,
        drains=setup.drains,
    )
    for role, pool in cluster.pools.items():
        pool.start_with({pool.policy.variants[0].name: setup.start.get(role, 1)})
    _arrivals(cluster, trace)
    moments: list[Moment] = []
    tick, now = setup.policy.tick_seconds, 0.0
    while now < trace.seconds or (_unended(cluster) and now < trace.seconds + _OVERTIME_SECONDS):
        now += tick
        cluster.clock.run(now)
        reading = Reading(cluster.view(), cluster.gateway.waiting, cluster.latencies)
        chosen = autoscaler.decide(reading)
        # what shrinks goes first, so that its devices are free for what grows
        for role in sorted(chosen, key=lambda role: _growth(cluster, role, chosen[role])):
            cluster.pools[role].scale(chosen[role].variants, claim=chosen[role].claim)
        cluster.settle()
        moments.append(_moment(cluster, now))
    return Run(
        trace=trace.name,
        seconds=trace.seconds,
        jobs=tuple(cluster.gateway.jobs),
        moments=tuple(moments),
        gaps=tuple(cluster.gateway.meters.gaps),
        inline_pictures=cluster.gateway.inline_pictures,
    )


def _arrivals(cluster: Cluster, trace: Trace) -> None:
    """Plan one arrival at a time: the heap stays small."""
    requests = iter(trace.requests)

    def arrive_next() -> None:
        request = next(requests, None)
        if request is not None:

            def arrive() -> None:
                cluster.gateway.arrive(request)
                arrive_next()

            cluster.clock.at(request.at, arrive)

    arrive_next()


def _unended(cluster: Cluster) -> bool:
    return any(job.ended_at is None for job in reversed(cluster.gateway.jobs))


def _growth(cluster: Cluster, role: Role, choice: Choice) -> int:
    return sum(choice.variants.values()) - sum(cluster.pools[role].wanted.values())


def _moment(cluster: Cluster, now: float) -> Moment:
    return Moment(
        at=now,
        wanted={role: sum(pool.wanted.values()) for role, pool in cluster.pools.items()},
        taking={role: len(pool.taking) for role, pool in cluster.pools.items()},
        accelerators=cluster.accelerators,
        cost_per_hour=cluster.cost_per_hour,
        waiting=sum(cluster.gateway.waiting.values()),
    )
