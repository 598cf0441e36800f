"""What one turn wants, as one value. Pure: the same view gives the same intent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import OnDemand, ScalingMode, VLMService
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.inputs import pool_owner
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.names import Role
from vlm_operator.plan import Options as PlanOptions
from vlm_operator.plan import Plan, plan
from vlm_operator.pods import place
from vlm_operator.reconcile.rolling import plot, roll, rolling
from vlm_operator.reconcile.sizing import Sizing, size_pools
from vlm_operator.rollout import (
    Course,
    Gate,
    Key,
    Step,
    current_revisions,
    drain_seconds,
    keep_defaults,
    key_of,
    settle,
)
from vlm_operator.state import DeploymentState, Observed, Revision


@dataclasses.dataclass(frozen=True)
class Options:
    """The operator's settings, as far as decisions need them."""

    worker_image: str = "triptych/worker:dev"
    cluster_domain: str = "cluster.local"
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    spare_seconds: float = 120.0  # without a node, after which a new pod has no spare capacity


@dataclasses.dataclass(frozen=True)
class Intent:
    """Everything that one turn wants.

    Attributes:
        service: with every default filled in.
        sizing: what the decisions rest on, and the memory for the next turn.
        desired: replicas of each pool in the end.
        replicas: of every Deployment now, by role, variant and revision.
        claims: numbers that the autoscaler writes into VLMPools.
        draining: pods that finish what they have.
    """

    service: VLMService
    revisions: Mapping[tuple[Role, str], Revision]
    decisions: Mapping[Role, Decision]
    sizing: Sizing
    desired: Mapping[Role, int]
    step: Step
    replicas: Mapping[Key, int]
    gates: tuple[Gate, ...]
    draining: tuple[str, ...]
    claims: Mapping[Role, int]
    plan: Plan

    @property
    def asleep(self) -> bool:
        """A pool is at zero, and gateways hold requests until it wakes."""
        return not self.service.spec.suspend and any(
            self.desired[role] == 0
            and pool.zero is not None
            and pool.zero.on_demand is OnDemand.QUEUE
            for role, pool in self.sizing.policy.pools.items()
        )


def intend(
    written: VLMService,
    observed: Observed,
    memory: Memory,
    *,
    options: Options,
    progressed: float = 0.0,
) -> Intent:
    """Decide everything about one service from one view of it.

    `memory` is the autoscaler's, as the last turn left it. `progressed` is when the service last
    got on, in seconds since the epoch.

    Raises:
        SpecError: the cluster does not allow what the manifest asks for.
    """
    deployments = observed.deployments()
    placed = place(written, observed.node_classes)
    service, shared = keep_defaults(placed, deployments, worker_image=options.worker_image)
    images = options.plan.images
    revisions = current_revisions(
        service, shared, deployments, pull_policy=images.pull_policy, bind=images.bind
    )
    whither = plot(
        service, observed, revisions, patience=options.spare_seconds, progressed=progressed
    )
    sizing = _size(service, observed, whither, memory)
    decisions = sizing.outcome.decisions
    suspended = service.spec.suspend
    desired = {role: 0 if suspended else item.to for role, item in decisions.items()}
    target = {
        (role, variant.name): 0 if suspended else decisions[role].variants.get(variant.name, 0)
        for role, pool in service.spec.pools.present.items()
        for variant in pool.variants
    }
    step = roll(service, observed, whither, target, patience=options.spare_seconds)
    replicas, gates, draining = _settle(service, observed, deployments, step)
    return Intent(
        service=service,
        revisions=revisions,
        decisions=decisions,
        sizing=sizing,
        desired=desired,
        step=step,
        replicas=replicas,
        gates=gates,
        draining=draining,
        claims=_claims(service, observed, decisions),
        plan=plan(
            service,
            observed,
            revisions=revisions,
            replicas=replicas,
            desired=desired,
            step=step,
            options=options.plan,
        ),
    )


def held_gates(observed: Observed) -> tuple[Gate, ...]:
    """What pods are told while their manifest is refused: what comes up takes work, none drains."""
    gates: list[Gate] = []
    for item in observed.deployments():
        pods = [
            pod
            for pod in observed.of(item.role)
            if (pod.variant, pod.revision) == (item.variant, item.revision)
        ]
        if item.role is not Role.GATEWAY:
            settled = settle(
                item,
                pods,
                observed.samples,
                want=item.desired,
                timeout=drain_seconds(item, None),
                at_once=0,
                now=observed.now,
            )
            gates += settled.gates
    return tuple(gates)


def _size(service: VLMService, observed: Observed, whither: Course, memory: Memory) -> Sizing:
    deployments = observed.deployments()
    return size_pools(
        service,
        observed,
        memory,
        current=[(role, goal.revision) for (role, _), goal in whither.goals.items()],
        rolling=[
            role
            for role in service.spec.pools.present
            if rolling(whither, [item for item in deployments if item.role is role])
        ],
    )


def _settle(
    service: VLMService,
    observed: Observed,
    deployments: tuple[DeploymentState, ...],
    step: Step,
) -> tuple[dict[Key, int], tuple[Gate, ...], tuple[str, ...]]:
    """Bound what the step wants by what has drained."""
    live = {key_of(item): item for item in deployments if item.role is not Role.GATEWAY}
    replicas = {key: count for key, count in step.replicas.items() if key not in live}
    gates: list[Gate] = []
    draining: list[str] = []
    for key, deployment in live.items():
        role, variant, revision = key
        want = step.replicas.get(key, 0)
        pods = [
            pod for pod in observed.of(role) if (pod.variant, pod.revision) == (variant, revision)
        ]
        pool = service.spec.pools.of(role)
        stays = key in step.replicas and pool is not None and not service.spec.suspend
        settled = settle(
            deployment,
            pods,
            observed.samples,
            want=want,
            timeout=drain_seconds(deployment, pool),
            at_once=pool.drain.max_concurrent if stays and pool is not None else len(pods),
            now=observed.now,
        )
        gates += settled.gates
        draining += settled.draining
        if key in step.replicas or settled.replicas > 0:
            replicas[key] = settled.replicas
    return replicas, tuple(gates), tuple(draining)


def _claims(
    service: VLMService, observed: Observed, decisions: Mapping[Role, Decision]
) -> dict[Role, int]:
    """Numbers to write into VLMPools: missing ones, and those that are not ours or not as decided.

    In mode External the number is left to whoever wrote it.
    """
    found = {}
    for role, decision in decisions.items():
        if decision.claim is None:
            continue
        manifest = observed.child(names.KIND_POOL, names.child(service.name, role))
        now = observed.pool_replicas(service.name, role)
        mode = service.spec.pools.present[role].scaling.mode
        taken = mode is not ScalingMode.EXTERNAL and pool_owner(manifest) not in (
            names.MANAGER_AUTOSCALER,
            None,
        )
        if now != decision.claim or taken:
            found[role] = decision.claim
    return found
