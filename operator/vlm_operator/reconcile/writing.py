"""Executes the plan of a turn. The order of writes is safe if the turn ends between any two.

patches   close a pod's gate before its Deployment shrinks; open it before a step waits for the pod
replicas  create each VLMPool with its replica count before the operator applies its other fields
plan      apply accounts and configuration before the pods that read them
prune     delete objects that the plan no longer names, last
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vlm_operator import names
from vlm_operator.apply import (
    Applied,
    SyncState,
    apply_plan,
    apply_pod_patches,
    apply_replicas,
    check_new,
    prune,
)
from vlm_operator.apply.compare import with_digest
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, Cluster, Manifest
from vlm_operator.errors import (
    ClusterError,
    ConflictError,
    NameConflictError,
    NamespaceEndsError,
    UnavailableError,
)
from vlm_operator.plan.children import replicas_apply
from vlm_operator.reconcile.accepted_spec import object_name as state_name
from vlm_operator.reconcile.decisions import TurnPlan
from vlm_operator.reconcile.retries import CHILD, TEMPLATE, Retries
from vlm_operator.state import ANNOTATION_APPLIED, Observed
from vlm_operator.status.causes import sentence
from vlm_operator.status.inputs import ConditionReason, Failure


@dataclasses.dataclass(frozen=True)
class ExecutionResult:
    """The result of one turn's writes.

    Attributes:
        failure: the first failure that needs a user, else the first; None if there is none.
        wrote: whether anything was written.
        answers: children as the API server returned them, by kind and name.
        pending: whether the plan of a paused service differs from its children.
    """

    failure: Failure | None
    wrote: bool
    answers: Mapping[tuple[str, str], Manifest] = dataclasses.field(default_factory=dict)
    pending: bool = False


async def execute(
    cluster: Cluster,
    turn_plan: TurnPlan,
    observed: Observed,
    *,
    sync_state: SyncState,
    retries: Retries,
) -> ExecutionResult:
    """Write what differs from the plan; recently refused writes wait for their backoff.

    If the namespace is being deleted, nothing is written.

    Raises:
        UnavailableError, ConflictError, LeaseLostError: the turn ends; the next one continues.
    """
    if not sync_state.ends:
        try:
            return await _carry_out(cluster, turn_plan, observed, sync_state, retries)
        except NamespaceEndsError:
            sync_state.ends = True
    message = "the namespace is being deleted: nothing is created there any more"
    return ExecutionResult(
        Failure(ConditionReason.DELETING_NAMESPACE, message, needs_user_action=False), wrote=False
    )


async def _carry_out(
    cluster: Cluster,
    turn_plan: TurnPlan,
    observed: Observed,
    sync_state: SyncState,
    retries: Retries,
) -> ExecutionResult:
    service = turn_plan.service
    count = await apply_pod_patches(
        cluster, turn_plan.pod_patches, namespace=service.namespace, now=observed.now
    )
    if service.spec.paused:
        return ExecutionResult(None, bool(count), pending=_differs(turn_plan, observed))
    refused = await _refused_template(cluster, turn_plan, observed, retries)
    if refused is not None:
        return ExecutionResult(refused, bool(count))
    claimed, unclaimed = await _claim(cluster, turn_plan, observed, retries)
    objects, waiting = _due(
        [item for item in turn_plan.plan.objects if _label(item) not in unclaimed],
        retries,
        now=observed.now,
    )
    applied = await apply_plan(
        cluster,
        objects,
        observed,
        namespace=service.namespace,
        uid=service.uid,
        sync_state=sync_state,
    )
    failures = _note(objects, applied, retries, now=observed.now)
    own = {
        (CONFIG_MAP.kind, names.child(service.name, "autoscaler")),
        (CONFIG_MAP.kind, state_name(service.name)),
    }
    gone = await prune(
        cluster,
        observed,
        turn_plan.plan.named | own,
        namespace=service.namespace,
    )
    answers = {**claimed, **applied.written}
    failure = _worst((*unclaimed.values(), *failures, *waiting))
    return ExecutionResult(failure, bool(count or answers or gone), answers)


async def _claim(
    cluster: Cluster, turn_plan: TurnPlan, observed: Observed, retries: Retries
) -> tuple[dict[tuple[str, str], Manifest], dict[str, Failure]]:
    """Write the autoscaler's replica counts into VLMPools.

    Returns:
        The written pools by kind and name, and failures of the others by "kind name".
    """
    claimed: dict[tuple[str, str], Manifest] = {}
    failures: dict[str, Failure] = {}
    service, now = turn_plan.service, observed.now
    for role, number in turn_plan.pool_replicas.items():
        claim = replicas_apply(service, role, number)
        pool = _label(claim)
        label = f"claim of {pool}"
        held = retries.held(label, number, now=now)
        if held is not None:
            failures[pool] = held
            continue
        try:
            answer = await apply_replicas(cluster, claim, observed, uid=service.uid)
            claimed[claim["kind"], claim["metadata"]["name"]] = answer
            retries.succeeded(label)
        except NameConflictError as error:
            failures[pool] = _conflict(error)
            retries.failed(label, number, failures[pool], backoff=CHILD, now=now)
        except (UnavailableError, ConflictError, NamespaceEndsError):
            raise
        except ClusterError as error:
            failures[pool] = retries.refused(label, number, _refusal(pool, error), now=now)
    return claimed, failures


def _due(
    objects: Sequence[Manifest], retries: Retries, *, now: float
) -> tuple[tuple[Manifest, ...], tuple[Failure, ...]]:
    """Return the objects to write now, and the failures of those that wait for their backoff."""
    found = [(item, retries.held(_label(item), item, now=now)) for item in objects]
    due = tuple(item for item, held in found if held is None)
    return due, tuple(held for _, held in found if held is not None)


def _note(
    objects: Sequence[Manifest], applied: Applied, retries: Retries, *, now: float
) -> tuple[Failure, ...]:
    """Record the result of each attempted object in `retries`; returns the failures."""
    conflicts = {f"{error.kind} {error.name}": _conflict(error) for error in applied.conflicts}
    refused = {label: _refusal(label, error) for label, error in applied.refused}
    failures = []
    for item in objects:
        label = _label(item)
        if label in conflicts:
            failures.append(conflicts[label])
            retries.failed(label, item, conflicts[label], backoff=CHILD, now=now)
        elif label in refused:
            failures.append(retries.refused(label, item, refused[label], now=now))
        else:
            retries.succeeded(label)
    return tuple(failures)


def _worst(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure that needs a user, else the first."""
    return next((item for item in failures if item.needs_user_action), next(iter(failures), None))


def _label(item: Manifest) -> str:
    return f"{item['kind']} {item['metadata']['name']}"


async def _refused_template(
    cluster: Cluster, turn_plan: TurnPlan, observed: Observed, retries: Retries
) -> Failure | None:
    """Dry-run new Deployments before anything is written; returns the first refusal.

    Users write placement fields freely, so only the API server can validate them.
    """
    for manifest in turn_plan.plan.objects:
        name = manifest["metadata"]["name"]
        if manifest["kind"] != DEPLOYMENT.kind or observed.child(DEPLOYMENT.kind, name):
            continue
        label = f"template of {name}"
        held = retries.held(label, manifest, now=observed.now)
        if held is not None:
            return held
        error = await check_new(cluster, manifest)
        if error is None:
            retries.succeeded(label)
        else:
            labels = manifest["metadata"]["labels"]
            role, variant = labels[names.LABEL_ROLE], labels.get(names.LABEL_VARIANT)
            place = f"spec.pools.{role}.variants[{variant}]" if variant else f"spec.{role}"
            message = sentence(
                f"{place}: {error.message.replace('; ', ', ')}", "correct that field"
            )
            failure = Failure(ConditionReason.TEMPLATE_REFUSED, message, accepted=False)
            retries.failed(label, manifest, failure, backoff=TEMPLATE, now=observed.now)
            return failure
    return None


def _differs(turn_plan: TurnPlan, observed: Observed) -> bool:
    """Whether a child is missing, or its digest differs from that of the planned manifest."""
    for manifest in turn_plan.plan.objects:
        live = observed.child(manifest["kind"], manifest["metadata"]["name"])
        noted = {} if live is None else live["metadata"].get("annotations", {})
        wanted = with_digest(manifest)["metadata"]["annotations"][ANNOTATION_APPLIED]
        if noted.get(ANNOTATION_APPLIED) != wanted:
            return True
    return False


def _conflict(error: NameConflictError) -> Failure:
    return Failure(ConditionReason.NAME_CONFLICT, str(error))


def _refusal(label: str, error: ClusterError) -> Failure:
    said = f"{label}: {error.reason or 'refused'}: {error.message.replace('; ', ', ')}"
    return Failure(ConditionReason.CHILD_REFUSED, sentence(said, "correct what refuses it"))
