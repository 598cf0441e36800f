"""What `estimate` looks at, made up: policies, pods, samples; a service that lives by ticks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.estimate import Estimate, EstimateMemory, estimate
from vlm_operator.autoscale.outcome import Need
from vlm_operator.autoscale.policy import (
    PoolPolicy,
    ServicePolicy,
    VariantPolicy,
    ZeroPolicy,
)
from vlm_operator.autoscale.view import PodView, PoolView, View
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import ItlHistogram, KvTokens, Sample, StageSeconds, Ttft, WorkCounters

NOW = 1_800_000_000.0
TICK = 5.0
BOUNDS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
PLAIN = VariantPolicy("plain")
EMPTY = WorkCounters(0.0, 0, 0, 0, 0.0)


def rules(role: Role, **changes) -> PoolPolicy:
    """A pool of mode Auto with one node type."""
    plain = PoolPolicy(
        role=role,
        mode=ScalingMode.AUTO,
        replicas=0,
        minimum=1,
        maximum=16,
        variants=(PLAIN,),
        inline=role is Role.PREFILL,
        utilization=0.75,
        kv_occupancy=0.8,
    )
    return dataclasses.replace(plain, **changes)


def policy(constants: Constants | None = None, **changes) -> ServicePolicy:
    """Three pools, goals of 1.5 s for text and 2.5 s for images; `encoder=` changes that pool."""
    pools = {
        role: rules(role, **changes.pop(role.value, {}))
        for role in POOL_ROLES
        if changes.get(role.value, {}) is not None
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    plain = ServicePolicy(
        pools=pools,
        ttft_seconds={"text": 1.5, "image": 2.5},
        interval_seconds=TICK,
        constants=constants or Constants(),
    )
    return dataclasses.replace(plain, **changes)


ZERO = ZeroPolicy(idle_seconds=60.0, while_at_zero=WhileAtZero.INLINE_AT_PREFILL)


def sample(uid: str, role: Role, **changes) -> Sample:
    """One answer of a pod."""
    kv = KvTokens(10_000, 0, 0, 0, 10_000, 0) if role in (Role.PREFILL, Role.DECODE) else None
    plain = Sample(
        pod_uid=uid,
        boot_id=f"boot-{uid}",
        role=role,
        phase="ready",
        message="",
        accepting=True,
        inflight=0,
        queued_requests=0,
        queued_work_seconds=0.0,
        started_work_seconds=0.0,
        kv=kv,
        model=None,
        ttft={},
        config_hash=None,
    )
    return dataclasses.replace(plain, **changes)


def kv(running: int, *, queued: int = 0, cached: int = 0, capacity: int = 10_000) -> KvTokens:
    """A cache so full."""
    return KvTokens(capacity, running, 0, cached, max(0, capacity - running), queued)


def ready(uid: str, *, variant: str = "plain", created: float = NOW - 900) -> PodView:
    """A pod that takes work."""
    return PodView(uid, variant, "ready", created, created + 60)


def cumulative(values: Sequence[float]) -> dict[float, int]:
    """Buckets with these sizes."""
    return {bound: sum(value <= bound for value in values) for bound in BOUNDS}


def ttft(requests: Sequence[Mapping[str, float]], target: float) -> Ttft:
    """What a gateway counts of requests, each given as seconds by stage."""
    stages = sorted({stage for request in requests for stage in request})
    totals = [sum(request.values()) for request in requests]
    met = [total <= target for total in totals]

    def spent(stage: str, which: bool) -> float:
        return sum(
            request.get(stage, 0.0)
            for request, good in zip(requests, met, strict=True)
            if good is which
        )

    return Ttft(
        count=len(requests),
        missed=met.count(False),
        sum_seconds=sum(totals),
        buckets=cumulative(totals),
        stages={
            stage: StageSeconds(
                met=spent(stage, True),
                missed=spent(stage, False),
                buckets=cumulative([request.get(stage, 0.0) for request in requests]),
            )
            for stage in stages
        },
    )


def gateway(
    uid: str = "gateway",
    *,
    held: int = 0,
    gaps: Sequence[float] = (),
    boot: str = "boot-gateway",
    **found: Ttft,
) -> Sample:
    """A gateway's answer."""
    return sample(
        uid,
        Role.GATEWAY,
        boot_id=boot,
        ttft=found,
        gaps=ItlHistogram(len(gaps), cumulative(gaps)),
        held_for={"encoder": held} if held else {},
    )


@dataclasses.dataclass
class Pod:
    """A pod whose counters grow; its own test writes it."""

    uid: str
    role: Role
    variant: str = "plain"
    rate: float = 0.0  # work seconds admitted a second
    queued: float = 0.0
    tokens: int = 0
    queued_tokens: int = 0
    inflight: int = 0
    capacity: int = 10_000
    lends: bool = False  # an encoder with KV for text
    busy: dict[str, WorkCounters] = dataclasses.field(default_factory=dict)
    phase: str = "ready"
    created: float = NOW - 900
    scheduled: float | None = None
    answers: bool = True
    boot: str = "a"
    admitted: float = 0.0

    def sample(self) -> Sample:
        """Its answer now."""
        has_kv = self.lends or self.role in (Role.PREFILL, Role.DECODE)
        return sample(
            self.uid,
            self.role,
            boot_id=self.boot,
            inflight=self.inflight,
            queued_work_seconds=self.queued,
            started_work_seconds=self.admitted,
            kv=kv(self.tokens, queued=self.queued_tokens, capacity=self.capacity)
            if has_kv
            else None,
            busy=dict(self.busy),
        )

    def work(self, kind: str, *, seconds: float, calls: int, items: int, units: int, squares=0.0):
        """Compute something."""
        old = self.busy.get(kind, EMPTY)
        self.busy[kind] = WorkCounters(
            old.seconds + seconds,
            old.calls + calls,
            old.items + items,
            old.units + units,
            old.squares + squares,
        )


class Service:
    """Pods and gateways that live from tick to tick, and the memory of the estimates."""

    def __init__(self, asked: ServicePolicy, **replicas: int) -> None:
        self.policy = asked
        self.now = NOW
        self.memory = EstimateMemory()
        self.gateways: dict[str, Sample] = {}
        self.requests: dict[str, list[Mapping[str, float]]] = {}
        self.gaps: list[float] = []
        self.held = 0
        self.pods = [
            Pod(f"{role}-{index}", role)
            for role in POOL_ROLES
            for index in range(replicas.get(role.value, 1))
            if role in asked.pools
        ]

    def of(self, role: Role) -> list[Pod]:
        """Pods of a role."""
        return [pod for pod in self.pods if pod.role is role]

    def finish(self, modality: str, count: int, **stages: float) -> None:
        """So many requests got their first token."""
        self.requests.setdefault(modality, []).extend([stages] * count)

    def view(self) -> View:
        """Everything as it is now."""
        pools = {}
        for role in self.policy.pools:
            pods = tuple(
                PodView(
                    pod.uid,
                    pod.variant,
                    pod.phase,
                    pod.created,
                    pod.created + 60 if pod.phase == "ready" else None,
                    pod.scheduled,
                )
                for pod in self.of(role)
            )
            pools[role] = PoolView(len(pods), None, {"plain": len(pods)}, pods)
        samples = {pod.uid: pod.sample() for pod in self.pods if pod.answers}
        goals = self.policy.ttft_seconds
        counted = {
            name: ttft(requests, goals.get(name, math.inf))
            for name, requests in self.requests.items()
        }
        samples["gateway"] = gateway(held=self.held, gaps=self.gaps, **counted)
        return View(self.now, pools, samples)

    def tick(self, count: int = 1) -> Estimate:
        """Let time pass, work be admitted, and estimate; returns the last one."""
        assert count > 0
        for _ in range(count):
            self.now += self.policy.interval_seconds
            for pod in self.pods:
                pod.admitted += pod.rate * self.policy.interval_seconds
            found, self.memory = estimate(self.policy, self.view(), self.memory)
        return found


def busy(service: Service, role: Role, rate: float) -> None:
    """Let every pod of a role admit this many work seconds per second."""
    for pod in service.of(role):
        pod.rate = rate


def signals(need: Need) -> dict[str, int]:
    """What each signal asked for."""
    return {item.signal: item.replicas for item in need.candidates}
