"""Plans one turn, as one value. Pure: the same view gives the same plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import ScalingMode, VLMService, WhileAtZero
from vlm_operator.autoscale.constants import CONSTANTS, Constants
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.inputs import pool_owner
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.names import Role
from vlm_operator.plan.children import Plan, plan
from vlm_operator.plan.deployments import Options as PlanOptions
from vlm_operator.pods.worker import place
from vlm_operator.reconcile.rolling import choose_rollout_target, plan_rollout, rolling
from vlm_operator.reconcile.sizing import Sizing, size_pools
from vlm_operator.rollout.drain import PodPatch, plan_drain
from vlm_operator.rollout.revisions import current_revisions, drain_seconds, keep_defaults
from vlm_operator.rollout.steps import Step
from vlm_operator.rollout.target import RolloutTarget
from vlm_operator.state import DeploymentState, Key, Observed, Revision


@dataclasses.dataclass(frozen=True)
class Options:
    """The operator's settings that decisions need."""

    worker_image: str = "triptych/worker:dev"
    cluster_domain: str = "cluster.local"
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    spare_seconds: float = 120.0  # a new pod without a node for longer has no capacity
    constants: Constants = CONSTANTS  # of the autoscaler


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """Everything that one turn decides.

    Attributes:
        service: the service with every default filled in.
        sizing: input and output of the autoscaler, with its memory for the next turn.
        desired: final number of replicas of each pool.
        replicas: replicas of every Deployment now, by role, variant and revision.
        pool_replicas: replica counts that the autoscaler writes into VLMPools.
        draining: names of pods that accept no new requests and finish the running ones.
    """

    service: VLMService
    revisions: Mapping[tuple[Role, str], Revision]
    decisions: Mapping[Role, Decision]
    sizing: Sizing
    desired: Mapping[Role, int]
    step: Step
    replicas: Mapping[Key, int]
    pod_patches: tuple[PodPatch, ...]
    draining: tuple[str, ...]
    pool_replicas: Mapping[Role, int]
    plan: Plan

    @property
    def asleep(self) -> bool:
        """Whether a pool has zero replicas and its gateways queue requests until it scales up."""
        return not self.service.spec.stopped and any(
            self.desired[role] == 0
            and pool.zero is not None
            and pool.zero.while_at_zero is WhileAtZero.QUEUE
            for role, pool in self.sizing.policy.pools.items()
        )


def plan_turn(
    written: VLMService,
    observed: Observed,
    memory: Memory,
    *,
    options: Options,
    progressed: float = 0.0,
) -> TurnPlan:
    """Decide everything about one service from one view of it.

    `memory` is the autoscaler's memory after the last turn. `progressed` is when the service last
    made progress, in seconds since the epoch.

    Raises:
        SpecError: the manifest cannot be applied to this cluster.
    """
    deployments = observed.deployments()
    placed = place(written, observed.node_classes)
    service, shared = keep_defaults(placed, deployments, worker_image=options.worker_image)
    images = options.plan.images
    revisions = current_revisions(
        service, shared, deployments, pull_policy=images.pull_policy, bind=images.bind
    )
    rollout_target = choose_rollout_target(
        service,
        observed,
        revisions,
        unschedulable_timeout=options.spare_seconds,
        progressed=progressed,
    )
    sizing = _size(service, observed, rollout_target, memory, options.constants)
    decisions = sizing.outcome.decisions
    stopped = service.spec.stopped
    desired = {role: 0 if stopped else item.to for role, item in decisions.items()}
    target = {
        (role, variant.name): 0 if stopped else decisions[role].variants.get(variant.name, 0)
        for role, pool in service.spec.pools.present.items()
        for variant in pool.variants
    }
    step = plan_rollout(
        service, observed, rollout_target, target, unschedulable_timeout=options.spare_seconds
    )
    replicas, pod_patches, draining = _bounded_by_drains(service, observed, deployments, step)
    return TurnPlan(
        service=service,
        revisions=revisions,
        decisions=decisions,
        sizing=sizing,
        desired=desired,
        step=step,
        replicas=replicas,
        pod_patches=pod_patches,
        draining=draining,
        pool_replicas=_pool_replicas(service, observed, decisions),
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


def hold_drains(observed: Observed) -> tuple[PodPatch, ...]:
    """Return patches for a refused manifest: new pods accept work, no pod starts to drain."""
    pod_patches: list[PodPatch] = []
    for item in observed.deployments():
        pods = [
            pod
            for pod in observed.of(item.role)
            if (pod.variant, pod.revision) == (item.variant, item.revision)
        ]
        if item.role is not Role.GATEWAY:
            drain = plan_drain(
                item,
                pods,
                observed.samples,
                want=item.desired,
                timeout=drain_seconds(item, None),
                at_once=0,
                now=observed.now,
            )
            pod_patches += drain.pod_patches
    return tuple(pod_patches)


def _size(
    service: VLMService,
    observed: Observed,
    rollout_target: RolloutTarget,
    memory: Memory,
    constants: Constants,
) -> Sizing:
    deployments = observed.deployments()
    return size_pools(
        service,
        observed,
        memory,
        current=[(role, goal.revision) for (role, _), goal in rollout_target.goals.items()],
        rolling=[
            role
            for role in service.spec.pools.present
            if rolling(rollout_target, [item for item in deployments if item.role is role])
        ],
        constants=constants,
    )


def _bounded_by_drains(
    service: VLMService,
    observed: Observed,
    deployments: tuple[DeploymentState, ...],
    step: Step,
) -> tuple[dict[Key, int], tuple[PodPatch, ...], tuple[str, ...]]:
    """Keep replicas of the step's Deployments until their pods have drained.

    Returns:
        Replicas by Deployment, patches of pods, and the names of draining pods.
    """
    live = {item.key: item for item in deployments if item.role is not Role.GATEWAY}
    replicas = {key: count for key, count in step.replicas.items() if key not in live}
    pod_patches: list[PodPatch] = []
    draining: list[str] = []
    for key, deployment in live.items():
        role, variant, revision = key
        want = step.replicas.get(key, 0)
        pods = [
            pod for pod in observed.of(role) if (pod.variant, pod.revision) == (variant, revision)
        ]
        pool = service.spec.pools.of(role)
        stays = key in step.replicas and pool is not None and not service.spec.stopped
        drain = plan_drain(
            deployment,
            pods,
            observed.samples,
            want=want,
            timeout=drain_seconds(deployment, pool),
            at_once=pool.drain.max_concurrent if stays and pool is not None else len(pods),
            now=observed.now,
        )
        pod_patches += drain.pod_patches
        draining += drain.draining
        if key in step.replicas or drain.replicas > 0:
            replicas[key] = drain.replicas
    return replicas, tuple(pod_patches), tuple(draining)


def _pool_replicas(
    service: VLMService, observed: Observed, decisions: Mapping[Role, Decision]
) -> dict[Role, int]:
    """Return replica counts to write into VLMPools.

    A count is written if it is missing, differs from the decision or has another field manager.
    In mode External the other manager keeps the field.
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
