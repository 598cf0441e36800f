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
from vlm_operator.apply.compare import with_digest
from vlm_operator.apply.objects import apply_plan, apply_replicas, check_new, key_of, prune
from vlm_operator.apply.pod_and_status_writes import apply_pod_patches
from vlm_operator.apply.sync_state import SyncState
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, Cluster, Manifest
from vlm_operator.errors import ENDS_TURN, ClusterError, NameConflictError, NamespaceEndsError
from vlm_operator.plan.children import replicas_apply
from vlm_operator.reconcile.accepted_spec import object_name as state_name
from vlm_operator.reconcile.decisions import TurnPlan
from vlm_operator.reconcile.retries import CHILD, TEMPLATE, Retries
from vlm_operator.state import Observed
from vlm_operator.state.deployments import ANNOTATION_APPLIED
from vlm_operator.status.causes import sentence
from vlm_operator.status.inputs import ConditionReason, Failure

NO_IMAGE_VOLUMES = "the API server has no image volumes, which oci:// needs"
FIX_IMAGE_VOLUMES = (
    "use Kubernetes 1.35, enable the feature gate ImageVolume, or put the model into a claim"
)


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
            return await _execute(cluster, turn_plan, observed, sync_state, retries)
        except NamespaceEndsError:
            sync_state.ends = True
    message = "the namespace is being deleted: nothing is created there any more"
    return ExecutionResult(
        Failure(ConditionReason.DELETING_NAMESPACE, message, needs_user_action=False), wrote=False
    )


async def _execute(
    cluster: Cluster,
    turn_plan: TurnPlan,
    observed: Observed,
    sync_state: SyncState,
    retries: Retries,
) -> ExecutionResult:
    service, namespace = turn_plan.service, turn_plan.service.namespace
    num_patches = await apply_pod_patches(
        cluster, turn_plan.pod_patches, namespace=namespace, now=observed.now
    )
    if service.spec.paused:
        return ExecutionResult(None, bool(num_patches), pending=_differs(turn_plan, observed))
    refused = await _refused_template(cluster, turn_plan, observed, retries)
    if refused is not None:
        return ExecutionResult(refused, bool(num_patches))
    pools, pool_failures = await _write_replicas(cluster, turn_plan, observed, retries)
    objects, waiting = _due(
        [item for item in turn_plan.plan.objects if _label(item) not in pool_failures],
        retries,
        now=observed.now,
    )
    written, errors = await apply_plan(
        cluster, objects, observed, uid=service.uid, sync_state=sync_state
    )
    failures = []
    for item in objects:
        error = errors.get(key_of(item))
        if error is None:
            retries.succeeded(_label(item))
        else:
            failures.append(_failure(error, _label(item), item, retries, now=observed.now))
    own = {
        (CONFIG_MAP.kind, names.child(service.name, "autoscaler")),
        (CONFIG_MAP.kind, state_name(service.name)),
    }
    pruned = await prune(cluster, observed, turn_plan.plan.named | own, namespace=namespace)
    answers = {**pools, **written}
    failure = _worst((*pool_failures.values(), *failures, *waiting))
    return ExecutionResult(failure, bool(num_patches or answers or pruned), answers)


async def _write_replicas(
    cluster: Cluster, turn_plan: TurnPlan, observed: Observed, retries: Retries
) -> tuple[dict[tuple[str, str], Manifest], dict[str, Failure]]:
    """Write the autoscaler's replica counts into VLMPools.

    Returns:
        The written pools by kind and name, and failures of the others by "kind name".
    """
    written: dict[tuple[str, str], Manifest] = {}
    failures: dict[str, Failure] = {}
    service, now = turn_plan.service, observed.now
    for role, number in turn_plan.pool_replicas.items():
        manifest = replicas_apply(service, role, number)
        pool = _label(manifest)
        label = f"replicas of {pool}"
        if (held := retries.held(label, number, now=now)) is not None:
            failures[pool] = held
            continue
        try:
            answer = await apply_replicas(cluster, manifest, observed, uid=service.uid)
            written[key_of(manifest)] = answer
            retries.succeeded(label)
        except ENDS_TURN:
            raise
        except (NameConflictError, ClusterError) as error:
            failures[pool] = _failure(error, label, number, retries, now=now, subject=pool)
    return written, failures


def _due(
    objects: Sequence[Manifest], retries: Retries, *, now: float
) -> tuple[tuple[Manifest, ...], tuple[Failure, ...]]:
    """Return the objects to write now, and the failures of those that wait for their backoff."""
    failures = [(item, retries.held(_label(item), item, now=now)) for item in objects]
    due = tuple(item for item, failure in failures if failure is None)
    return due, tuple(failure for _, failure in failures if failure is not None)


def _failure(
    error: NameConflictError | ClusterError,
    label: str,
    wanted: object,
    retries: Retries,
    *,
    now: float,
    subject: str = "",
) -> Failure:
    """Record that the write `label` of `wanted` failed, so that it waits for its backoff."""
    if isinstance(error, NameConflictError):
        failure = Failure(ConditionReason.NAME_CONFLICT, str(error))
        retries.failed(label, wanted, failure, backoff=CHILD, now=now)
        return failure
    cause = f"{subject or label}: {error.reason or 'refused'}: {error.message.replace('; ', ', ')}"
    message = sentence(cause, "correct what refuses it")
    return retries.refused(label, wanted, Failure(ConditionReason.CHILD_REFUSED, message), now=now)


def _worst(failures: Sequence[Failure]) -> Failure | None:
    return next((item for item in failures if item.needs_user_action), next(iter(failures), None))


def _label(item: Manifest) -> str:
    return " ".join(key_of(item))


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
        if (held := retries.held(label, manifest, now=observed.now)) is not None:
            return held
        error = await check_new(cluster, manifest)
        if error is None:
            retries.succeeded(label)
        else:
            labels = manifest["metadata"]["labels"]
            role, variant = labels[names.LABEL_ROLE], labels.get(names.LABEL_VARIANT)
            field = f"spec.pools.{role}.variants[{variant}]" if variant else f"spec.{role}"
            cause = f"{field}: {error.message.replace('; ', ', ')}"
            message = sentence(cause, "correct that field")
            if turn_plan.service.spec.model.uri.startswith("oci://") and error.reason == "Dropped":
                message = sentence(f"spec.model.uri: {NO_IMAGE_VOLUMES}", FIX_IMAGE_VOLUMES)
            failure = Failure(ConditionReason.TEMPLATE_REFUSED, message, accepted=False)
            retries.failed(label, manifest, failure, backoff=TEMPLATE, now=observed.now)
            return failure
    return None


def _differs(turn_plan: TurnPlan, observed: Observed) -> bool:
    """Whether a child is missing, or its digest differs from that of the planned manifest."""
    for manifest in turn_plan.plan.objects:
        live = observed.child(manifest["kind"], manifest["metadata"]["name"])
        present = {} if live is None else live["metadata"].get("annotations", {})
        wanted = with_digest(manifest)["metadata"]["annotations"]
        if present.get(ANNOTATION_APPLIED) != wanted[ANNOTATION_APPLIED]:
            return True
    return False
