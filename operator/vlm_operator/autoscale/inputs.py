"""Builds the inputs of a decision from a manifest, its node classes and the observed state.

VLMService, NodeClassState ─▶ ServicePolicy        Observed ─▶ View
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from vlm_operator import names
from vlm_operator.api import Pool, Variant, VLMService, quantity
from vlm_operator.api.enums import WhileAtZero
from vlm_operator.api.scaling import Behavior, Targets
from vlm_operator.autoscale.constants import CONSTANTS, Constants
from vlm_operator.autoscale.policy import (
    Budget,
    PoolPolicy,
    Ratio,
    ServicePolicy,
    SleepPolicy,
    VariantPolicy,
    ZeroPolicy,
)
from vlm_operator.autoscale.view import PodPhase, PodView, PoolView, View
from vlm_operator.names import Role
from vlm_operator.state import DeploymentState, Manifest, NodeClassState, Observed, PodState

_PLACEMENT_FIELDS = (
    "affinity",
    "nodeSelector",
    "priorityClassName",
    "resourceClaims",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
)


def service_policy(
    service: VLMService, classes: Mapping[str, NodeClassState], *, constants: Constants = CONSTANTS
) -> ServicePolicy:
    """Build the policy of a service.

    Args:
        service: the service with defaults and node classes filled in (`pods.place`, `api.resolve`).
        classes: the cluster's VLMNodeClasses by name.
        constants: constants of the method.
    """
    spec = service.spec
    pools = {role: _pool(service, role, pool, classes) for role, pool in spec.pools.present.items()}
    fallback = spec.autoscaling.fallback_replicas
    itl = spec.slo.itl_p95_milliseconds
    return ServicePolicy(
        pools=pools,
        ttft_seconds=_targets(service),
        itl_seconds=None if itl is None else itl / 1000,
        window_seconds=float(spec.slo.window_seconds),
        budget=_budget(service, pools),
        pool_ratios=tuple(
            Ratio(
                item.numerator, item.denominator, _share(item.min_percent), _share(item.max_percent)
            )
            for item in spec.pool_ratios
        ),
        apply=spec.autoscaling.policy,
        missing=spec.autoscaling.missing_metrics,
        fallback={}
        if fallback is None
        else {Role(role): count for role, count in fallback.to_dict().items()},
        interval_seconds=float(spec.autoscaling.interval_seconds),
        backlog_seconds=float(spec.autoscaling.backlog_seconds),
        constants=constants,
        sleep=None
        if spec.scale_to_zero is None or spec.stopped
        else SleepPolicy(float(spec.scale_to_zero.idle_seconds)),
    )


def service_view(
    service: VLMService,
    observed: Observed,
    deployments: Iterable[DeploymentState],
    *,
    revisions: Mapping[tuple[Role, str], str],
    rolling: Collection[Role],
) -> View:
    """Build the view of a service.

    Args:
        service: the service with its pools.
        observed: the state that this turn read.
        deployments: Deployments of all roles.
        revisions: revision of each target, by role and variant.
        rolling: roles that have pods of another revision.
    """
    live = list(deployments)
    return View(
        now=observed.now,
        pools={
            role: _pool_view(service, role, observed, live, revisions, role in rolling)
            for role in service.spec.pools.present
        },
        samples=observed.samples,
        gateways=tuple(pod.uid for pod in observed.of(Role.GATEWAY) if pod.served or pod.deleting),
    )


def pool_owner(pool: Manifest | None) -> str | None:
    """Return the field manager that owns `spec.replicas` of a VLMPool; None if there is none.

    A manager other than the autoscaler takes precedence.
    """
    if pool is None:
        return None
    owners = [
        entry["manager"]
        for entry in pool["metadata"].get("managedFields", [])
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    ]
    others = [name for name in owners if name != names.MANAGER_AUTOSCALER]
    return others[0] if others else next(iter(owners), None)


def _pool(
    service: VLMService, role: Role, pool: Pool, classes: Mapping[str, NodeClassState]
) -> PoolPolicy:
    scaling = pool.scaling
    behavior, targets = scaling.behavior or Behavior(), scaling.targets or Targets()
    up, down, zero = behavior.scale_up, behavior.scale_down, scaling.scale_to_zero
    return PoolPolicy(
        role=role,
        mode=scaling.mode,
        replicas=scaling.replicas or 0,
        minimum=scaling.min_replicas or 0,
        maximum=scaling.max_replicas or 0,
        variants=tuple(_variant(role, variant, classes) for variant in pool.variants),
        utilization=targets.utilization_percent / 100,
        kv_occupancy=targets.kv_occupancy_percent / 100,
        up_seconds=float(up.stabilization_window_seconds),
        up_pods=up.max_pods_per_minute,
        down_seconds=float(down.stabilization_window_seconds),
        down_pods=down.max_pods_per_minute,
        zero=None if zero is None else ZeroPolicy(float(zero.idle_seconds), zero.while_at_zero),
        inline=_inline(service, role, pool),
    )


def _inline(service: VLMService, role: Role, pool: Pool) -> bool:
    """Whether this pool encodes images while no encoder pod does."""
    encoder = service.spec.pools.encoder
    if role is Role.ENCODER or encoder is None:
        return False
    zero = encoder.scaling.scale_to_zero
    allowed = zero is None or zero.while_at_zero is WhileAtZero.INLINE_AT_PREFILL
    return pool.encode_inline and allowed


def _variant(role: Role, variant: Variant, classes: Mapping[str, NodeClassState]) -> VariantPolicy:
    reference = variant.node_class_ref
    known = None if reference is None else classes.get(reference.name)
    return VariantPolicy(
        name=variant.name,
        cost_per_hour=known.cost_per_hour if known else None,
        accelerators=variant.accelerators(known.accelerator if known else None),
        speed=known.speed.get(role, 1.0) if known else 1.0,
        spot=known.spot if known else False,
        preference=variant.preference,
        max_replicas=variant.max_replicas,
        startup_seconds=known.startup_seconds if known else None,
        node_class=None if reference is None else reference.name,
    )


def _targets(service: VLMService) -> dict[str, float]:
    goals = service.spec.slo
    found: dict[str, float] = {}
    if goals.ttft_p95_milliseconds is not None:
        found = dict.fromkeys(("text", "image"), goals.ttft_p95_milliseconds / 1000)
    return found | {
        item.modality.value.lower(): item.ttft_p95_milliseconds / 1000 for item in goals.overrides
    }


def _budget(service: VLMService, pools: Mapping[Role, PoolPolicy]) -> Budget:
    written = service.spec.budget
    if written is None:
        return Budget()
    cost = written.max_cost_per_hour
    unknown = [
        f"{role} variant {variant.name}"
        for role, pool in pools.items()
        for variant in pool.variants
        if variant.cost_per_hour is None
    ]
    unreadable = ""
    if cost is not None and unknown:
        unreadable = (
            f"the cost of {unknown[0]} is unknown: give it a nodeClassRef whose class has cost"
        )
    return Budget(
        accelerators=written.max_accelerators,
        cost_per_hour=None if cost is None else float(quantity.parse(cost)),
        unreadable=unreadable,
    )


def _share(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _pool_view(
    service: VLMService,
    role: Role,
    observed: Observed,
    deployments: list[DeploymentState],
    revisions: Mapping[tuple[Role, str], str],
    rolling: bool,
) -> PoolView:
    own = [item for item in deployments if item.role is role]
    wanted = {variant: revision for (of, variant), revision in revisions.items() if of is role}
    newest = set(wanted.values())
    asked = [item for item in own if item.revision in newest]
    # until a rollout has moved replicas, older revisions have them all
    if not any(item.desired for item in asked):
        asked = [item for item in own if item.revision not in newest]
    live: dict[str, int] = {}
    for item in asked:
        live[item.variant] = live.get(item.variant, 0) + item.desired
    manifest = observed.child(names.KIND_POOL, names.child(service.name, role))
    placements = {
        (item.variant, item.revision): _placement(observed.child("Deployment", item.name))
        for item in own
    }
    return PoolView(
        replicas=observed.pool_replicas(service.name, role),
        owner=pool_owner(manifest),
        live=live,
        pods=tuple(
            _pod(pod, placements.get((pod.variant, pod.revision), "")) for pod in observed.of(role)
        ),
        rolling=rolling,
        revisions=wanted,
        placements={item[0]: placements[item] for item in wanted.items() if item in placements},
    )


def _placement(deployment: Manifest | None) -> str:
    """Return a digest of what decides on which nodes pods fit; "" without a Deployment."""
    if deployment is None:
        return ""
    spec = deployment["spec"]["template"]["spec"]
    containers = [*spec.get("initContainers", []), *spec.get("containers", [])]
    claims = [item.get("persistentVolumeClaim") for item in spec.get("volumes", [])]
    fields = {name: spec.get(name) for name in _PLACEMENT_FIELDS}
    resources = [item.get("resources") for item in containers]
    return names.digest_of([fields, resources, list(filter(None, claims))], length=8)


def _pod(pod: PodState, placement: str) -> PodView:
    phase: PodPhase = "starting"
    if pod.draining:
        phase = "draining"
    elif not pod.scheduled:
        phase = "pending"
    elif pod.ready:
        phase = "ready"
    return PodView(
        uid=pod.uid,
        variant=pod.variant,
        phase=phase,
        created=pod.created,
        ready_since=pod.accepting_since,
        scheduled_since=pod.scheduled_since,
        served=pod.served,
        became_ready=pod.ready_since,
        unready_since=pod.unready_since,
        revision=pod.revision,
        placement=placement,
    )
