"""A cluster that carries out decisions, with needs that a test makes up: no estimate, no I/O."""

import dataclasses
import random
from collections.abc import Mapping

from support.estimates import NOW, TICK, sample
from vlm_operator import names
from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.decide import decide_replicas
from vlm_operator.autoscale.estimate import Estimate
from vlm_operator.autoscale.history import ScalingMemory
from vlm_operator.autoscale.outcome import Attribution, Candidate, Decision, Need
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy, VariantPolicy
from vlm_operator.autoscale.startups import Phases
from vlm_operator.autoscale.view import PodView, PoolView, View
from vlm_operator.names import Role


def variant(name="a", **changes) -> VariantPolicy:
    plain = VariantPolicy(name, cost_per_hour=1.0, accelerators=1, startup_seconds=30.0)
    return dataclasses.replace(plain, **changes)


def pool(role=Role.DECODE, *variants: VariantPolicy, **changes) -> PoolPolicy:
    plain = PoolPolicy(
        role=role,
        mode=ScalingMode.AUTO,
        replicas=0,
        minimum=1,
        maximum=8,
        down_seconds=300.0,
        down_pods=1,
        variants=variants or (variant(),),
    )
    return dataclasses.replace(plain, **changes)


def service(*pools: PoolPolicy, **changes) -> ServicePolicy:
    return ServicePolicy(pools={item.role: item for item in pools}, **changes)


def need(units: float, role=Role.DECODE, **changes) -> Need:
    plain = Need(
        role=role,
        units=units,
        least_units=units * 1.2,
        candidates=(Candidate("kvTokens", max(0, round(units)) if abs(units) < 1e6 else 0),),
        bottleneck=True,
        known=True,
        idle=units == 0,
        message="",
    )
    return dataclasses.replace(plain, **changes)


def attribution(**changes) -> Attribution:
    plain = Attribution(
        modality="text",
        count=100,
        missed=0,
        p95_seconds=0.5,
        target_seconds=1.0,
        shares={"prefill": 1.0},
        service_seconds={},
    )
    return dataclasses.replace(plain, **changes)


@dataclasses.dataclass
class Pod:
    uid: str
    role: Role
    variant: str
    created: float
    phase: str = "pending"
    ready_since: float | None = None
    scheduled_since: float | None = None
    became_ready: float | None = None
    unready_since: float | None = None
    back_at: float = float("inf")
    gone_at: float = float("inf")

    @property
    def view(self) -> PodView:
        ready = self.phase == "ready"
        return PodView(
            self.uid,
            self.variant,
            self.phase,
            self.created,
            # the gate keeps its time when a container starts again
            self.ready_since if ready else None,
            self.scheduled_since,
            served=self.ready_since is not None,
            became_ready=self.became_ready if ready else None,
            unready_since=None if ready else self.unready_since,
        )


class World:
    """Deployments, pods that start and drain, nodes of which there may be too few.

    Attributes:
        nodes: of each variant's name; what is missing has plenty.
        startup, drain: seconds.
        phases: of starts, as they were timed.
        written: numbers that somebody else wrote, by role: (manager, replicas).
    """

    def __init__(self, policy: ServicePolicy, start: Mapping[Role, Mapping[str, int]], seed=0):
        self.policy = policy
        self.now = NOW
        self.memory = ScalingMemory()
        self.nodes: dict[str, int] = {}
        self.startup = 30.0
        self.phases: Mapping[tuple[Role, str], Phases] = {}
        self.drain = 20.0
        self.silent = 0.0
        self.rolling = False
        self.random = random.Random(seed)
        self.pods: list[Pod] = []
        self.count = 0
        self.target = {role: dict(start.get(role, {})) for role in policy.pools}
        self.numbers = {role: sum(start.get(role, {}).values()) for role in policy.pools}
        self.owners = dict.fromkeys(policy.pools, names.MANAGER_AUTOSCALER)
        self.decisions: dict[Role, Decision] = {}
        for role, variants in start.items():
            for name, count in variants.items():
                for _ in range(count):
                    self._add(role, name, ready=True)

    def _add(self, role, name, *, ready=False):
        self.count += 1
        pod = Pod(f"pod-{self.count}", role, name, self.now)
        if ready:
            pod.phase, pod.ready_since, pod.scheduled_since = "ready", self.now, self.now
            pod.became_ready = self.now
        self.pods.append(pod)

    def crash(self, pod: Pod, *, down: float):
        """The process of a ready pod ends, or its node is lost, for that time."""
        assert pod.phase == "ready"
        pod.phase, pod.unready_since, pod.back_at = "starting", self.now, self.now + down

    def write(self, role, manager, replicas):
        self.numbers[role], self.owners[role] = replicas, manager

    def view(self) -> View:
        pools = {}
        for role in self.policy.pools:
            own = [item for item in self.pods if item.role is role]
            live = dict(self.target[role])
            for item in own:
                if item.phase == "draining":
                    live[item.variant] = live.get(item.variant, 0) + 1
            pools[role] = PoolView(
                replicas=self.numbers[role],
                owner=self.owners[role],
                live=live,
                pods=tuple(item.view for item in own),
                rolling=self.rolling,
            )
        samples = {
            item.uid: sample(item.uid, item.role)
            for item in self.pods
            if item.phase == "ready" and self.random.random() >= self.silent
        }
        return View(self.now, pools, samples)

    def tick(self, needs, *, fresh=True, missing=0.0, attributions=(), itl=None, seconds=TICK):
        """One turn of the operator; then the time of the cluster advances."""
        view = self.seen = self.view()
        self.estimate = estimate = Estimate(
            attributions=tuple(attributions),
            needs={item.role: item for item in needs},
            fresh=fresh,
            missing_seconds=missing,
            startup={
                (role, item.name): item.startup_seconds or self.policy.constants.startup_seconds
                for role, rules in self.policy.pools.items()
                for item in rules.variants
            },
            itl_p95_seconds=itl,
            phases=self.phases,
        )
        self.decisions, self.memory = decide_replicas(self.policy, view, estimate, self.memory)
        self.carry_out(self.decisions)
        self.advance(seconds)
        return self.decisions

    def carry_out(self, decisions):
        for role, decision in decisions.items():
            self.target[role] = dict(decision.variants)
            if decision.claim is not None:
                self.numbers[role], self.owners[role] = decision.claim, names.MANAGER_AUTOSCALER
        self._reconcile()

    def advance(self, seconds):
        """Let pods be scheduled, become ready, and end."""
        self.now += seconds
        self.pods = [item for item in self.pods if item.gone_at > self.now]
        for item in self.pods:
            if item.phase == "pending":
                used = sum(
                    other.variant == item.variant and other.phase != "pending"
                    for other in self.pods
                )
                if used < self.nodes.get(item.variant, 10**9):
                    item.phase, item.scheduled_since = "starting", self.now
            if item.phase == "starting" and self.now >= min(
                item.back_at, float("inf") if item.ready_since else item.created + self.startup
            ):
                item.phase, item.became_ready = "ready", self.now
                item.ready_since = item.ready_since or self.now
        self._reconcile()

    def _reconcile(self):
        order = {"pending": 0, "starting": 1, "ready": 2}
        for role, target in self.target.items():
            variants = {*target, *(item.variant for item in self.pods if item.role is role)}
            for name in sorted(variants):
                own = [
                    item
                    for item in self.pods
                    if (item.role, item.variant) == (role, name) and item.phase != "draining"
                ]
                for item in sorted(own, key=lambda pod: order[pod.phase])[
                    : max(0, len(own) - target.get(name, 0))
                ]:
                    served = item.phase == "ready"
                    item.phase = "draining"
                    item.gone_at = self.now + (self.drain if served else 1.0)
                for _ in range(target.get(name, 0) - len(own)):
                    self._add(role, name)

    def replicas(self, role) -> int:
        return sum(self.target[role].values())

    def accelerators(self) -> int:
        """Devices that pods hold now, draining ones included."""
        return sum(self._variant(item).accelerators for item in self.pods)

    def cost(self) -> float:
        return sum(self._variant(item).cost_per_hour or 0.0 for item in self.pods)

    def _variant(self, item: Pod) -> VariantPolicy:
        return next(v for v in self.policy.pools[item.role].variants if v.name == item.variant)
