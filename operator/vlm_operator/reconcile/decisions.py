"""Plans one turn, as one value. Pure: the same view gives the same plan.

service, node classes ─▶ policy ┐
observed ─────────────▶ view    ├─▶ decide ─▶ sizes ─▶ rollout step ─▶ drains ─▶ plan of children
memory of the last turn ────────┘
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

from vlm_operator import names
from vlm_operator.api import ScalingMode, VLMService, stages
from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.constants import CONSTANTS, Constants
from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.inputs import pool_owner, service_policy, service_view
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy, VariantPolicy
from vlm_operator.autoscale.view import View
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.plan.children import Plan, plan
from vlm_operator.plan.deployments import Options as PlanOptions
from vlm_operator.pods.worker import place
from vlm_operator.rollout.drain import PodPatch, plan_drain
from vlm_operator.rollout.hold import hold
from vlm_operator.rollout.replica_counts import surge_limits
from vlm_operator.rollout.revisions import (
    current_revisions,
    drain_seconds,
    keep_defaults,
    wanted_identities,
)
from vlm_operator.rollout.steps import Step, next_step
from vlm_operator.rollout.target import RolloutTarget, Sizes, select_target, sizes
from vlm_operator.state import DeploymentState, Key, Observed, Revision
from vlm_operator.state.downloads import DownloadState, download_state


@dataclasses.dataclass(frozen=True)
class Options:
    worker_image: str = "triptych/worker:dev"
    gateway_image: str = ""  # empty: the worker's
    cluster_domain: str = "cluster.local"
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    spare_seconds: float = 120.0  # a new pod without a node for longer has no capacity
    constants: Constants = CONSTANTS  # of the autoscaler
    identity: str = ""  # issuer for services that name none; "" for plaintext
    identity_check_seconds: float = 300.0  # between two comparisons of a Secret of certificates


@dataclasses.dataclass(frozen=True)
class Sizing:
    """One tick of the autoscaler: policy, view and memory as input, and its outcome."""

    policy: ServicePolicy
    view: View
    before: Memory
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """Everything that one turn decides.

    Attributes:
        service: the service with every default filled in.
        sizing: input and output of the autoscaler, with its memory for the next turn.
        desired: final number of replicas of each pool.
        replicas: replicas of every Deployment now, by role, variant and revision.
        pool_replicas: replica counts that the autoscaler writes into VLMPools.
        identities: role and issuer of the certificates that pods use.
        draining: names of pods that accept no new requests and finish the running ones.
        download: the download of the model; None without `model.cache`.
        held: whether the rollout waits for it.
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
    identities: frozenset[tuple[Role, str]]
    plan: Plan
    download: DownloadState | None = None
    held: bool = False

    @property
    def asleep(self) -> bool:
        """Whether a pool has zero replicas and its gateways queue requests until it scales up."""
        if self.service.spec.stopped:
            return False
        sleep = self.sizing.outcome.memory.pace.sleep
        if sleep is not None and sleep.state in ("falling", "asleep"):
            return True
        return any(
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
    placed = _with_gateways(place(written, observed.node_classes), observed)
    service, shared = keep_defaults(
        placed,
        deployments,
        worker_image=options.worker_image,
        gateway_image=options.gateway_image,
        identity=options.identity,
    )
    images = options.plan.images
    revisions = current_revisions(
        service, shared, deployments, pull_policy=images.pull_policy, bind=images.bind
    )
    rollout_target = select_target(
        revisions,
        {
            role: frozenset(stage.value for stage in stages(service.spec.pools, role))
            for role in service.spec.pools.present
        },
        deployments,
        observed.pods,
        service.spec.rollout,
        unschedulable_timeout=options.spare_seconds,
        progressed=progressed,
        now=observed.now,
    )
    download = download_state(service, observed)
    held = None
    if download is not None and not download.complete:
        held = hold(rollout_target, deployments)
    if held is not None:
        rollout_target = held.target
    sizing = _size(service, observed, rollout_target, memory, options.constants)
    decisions = sizing.outcome.decisions
    stopped = service.spec.stopped
    none = stopped or (held is not None and held.empty)
    desired = {role: 0 if stopped else item.to for role, item in decisions.items()}
    target = {
        (role, variant.name): 0 if none else decisions[role].variants.get(variant.name, 0)
        for role, pool in service.spec.pools.present.items()
        for variant in pool.variants
    }
    front = 0 if none else service.spec.gateway.replicas
    step = _next_step(service, observed, rollout_target, target, front, options.spare_seconds)
    if held is not None and download is not None and not stopped:
        waiting = f"waits for the model, which Job {download.name} downloads"
        step = dataclasses.replace(step, waiting=waiting)
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
        identities=wanted_identities(revisions.values(), deployments),
        plan=plan(
            service,
            observed,
            revisions=revisions,
            replicas=replicas,
            desired=desired,
            step=step,
            options=options.plan,
        ),
        download=download,
        held=held is not None,
    )


def hold_drains(observed: Observed) -> tuple[PodPatch, ...]:
    """Return patches for a refused manifest: new pods accept work, no pod starts to drain."""
    pod_patches: list[PodPatch] = []
    for item in observed.deployments():
        if item.role is not Role.GATEWAY:
            drain = plan_drain(
                item,
                observed.of_deployment(item),
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
    """Decide the size of every pool.

    Raises:
        SpecError: the pools' minimum replicas exceed the budget.
    """
    policy = service_policy(service, observed.node_classes, constants=constants)
    if not service.spec.stopped:
        _check_budget(policy)
    deployments, goals = observed.deployments(), rollout_target.goals
    wanted = {(*key, goal.revision) for key, goal in goals.items()}
    view = service_view(
        service,
        observed,
        deployments,
        revisions={key: goal.revision for key, goal in goals.items()},
        rolling={
            item.role
            for item in deployments
            if item.desired + item.replicas > 0 and item.key not in wanted
        },
    )
    return Sizing(policy, view, memory, decide(policy, view, memory))


def _check_budget(policy: ServicePolicy) -> None:
    budget = policy.budget
    if budget.accelerators is not None:
        least = _least(policy, lambda item: float(item.accelerators))
        if least > budget.accelerators:
            raise SpecError(
                "spec.budget.maxAccelerators",
                f"{budget.accelerators} is less than the {least:g} that the pools' least replicas "
                "hold: raise it, or lower minReplicas",
            )
    if budget.cost_per_hour is not None and not budget.unreadable:
        least = _least(policy, lambda item: item.cost_per_hour or 0.0)
        if least > budget.cost_per_hour + 1e-9:
            raise SpecError(
                "spec.budget.maxCostPerHour",
                f"{budget.cost_per_hour:g} is less than the {least:g} that the pools' least "
                "replicas cost: raise it, or lower minReplicas",
            )


def _least(policy: ServicePolicy, price: Callable[[VariantPolicy], float]) -> float:
    """Return the least total price of all pools at their minimum, on their cheapest variants.

    A service that wakes starts at least one pod of each pool.
    """
    least = 0 if policy.sleep is None else 1
    return sum(_least_of(pool, price, least) for pool in policy.pools.values())


def _least_of(pool: PoolPolicy, price: Callable[[VariantPolicy], float], least: int) -> float:
    missing = pool.replicas if pool.mode is ScalingMode.MANUAL else max(pool.minimum, least)
    total = 0.0
    for item in sorted(pool.variants, key=price):
        count = missing if item.max_replicas is None else min(missing, item.max_replicas)
        total += count * price(item)
        missing -= count
    return total


def _next_step(
    service: VLMService,
    observed: Observed,
    rollout_target: RolloutTarget,
    target: Sizes,
    front: int,
    unschedulable_timeout: float,
) -> Step:
    """Decide the next step of the rollout.

    `target` are the replicas of the pools after it, `front` those of the gateway.
    """
    live = observed.deployments()
    whole = sizes(rollout_target.goals, {**target, (Role.GATEWAY, ""): front}, live)
    gateways = collections.Counter(
        pod.compat for pod in observed.pods if pod.role is Role.GATEWAY and not pod.finished
    )
    limits_by_role = surge_limits(
        service, observed, rollout_target.goals, whole, unschedulable_timeout=unschedulable_timeout
    )
    step = next_step(
        rollout_target, whole, live, gateways, limits_by_role, service.spec.rollout.strategy
    )
    tight = [role for role, limits in limits_by_role.items() if limits.none]
    if step.done or not tight:
        return step
    reason = f"{step.waiting}; spec.budget does not allow one more {tight[0]} pod"
    return dataclasses.replace(step, waiting=reason, over_budget=True)


def _bounded_by_drains(
    service: VLMService, observed: Observed, deployments: tuple[DeploymentState, ...], step: Step
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
        want = step.replicas.get(key, 0)
        pods = observed.of_deployment(deployment)
        pool = service.spec.pools.of(deployment.role)
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
    counts = {}
    for role, decision in decisions.items():
        if decision.claim is None:
            continue
        manifest = observed.child(names.KIND_POOL, names.child(service.name, role))
        now = observed.pool_replicas(service.name, role)
        mode = service.spec.pools.present[role].scaling.mode
        other_owner = mode is not ScalingMode.EXTERNAL and pool_owner(manifest) not in (
            names.MANAGER_AUTOSCALER,
            None,
        )
        if now != decision.claim or other_owner:
            counts[role] = decision.claim
    gateway = service.spec.gateway
    if gateway.scaling and observed.pool_replicas(service.name, Role.GATEWAY) is None:
        counts[Role.GATEWAY] = gateway.replicas
    return counts


def _with_gateways(service: VLMService, observed: Observed) -> VLMService:
    """Take the number of gateways from their VLMPool, within its bounds, if they have one.

    Without the VLMPool, which somebody may have deleted, it is that of the live Deployments.
    """
    gateway = service.spec.gateway
    if gateway.scaling is None:
        return service
    live = sum(item.desired for item in observed.deployments() if item.role is Role.GATEWAY)
    wanted = observed.pool_replicas(service.name, Role.GATEWAY) or live or gateway.replicas
    count = min(max(wanted, gateway.scaling.min_replicas), gateway.scaling.max_replicas)
    scaled = gateway.model_copy(update={"replicas": count})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"gateway": scaled})})
