"""Carrying an intent out. The order is such that a cut between any two writes does no harm.

gates    a pod is told before its Deployment shrinks, and opened before anything waits for it
claims   a VLMPool exists, with its number, before the operator adds the rest
plan     accounts and configuration before the pods that read them
prune    what nobody names any more, last
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vlm_operator import names
from vlm_operator.apply import (
    Accepted,
    Applied,
    apply_gates,
    apply_plan,
    check_new,
    claim_pool,
    prune,
)
from vlm_operator.apply.compare import stamped
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, Cluster, Manifest
from vlm_operator.errors import (
    ClusterError,
    ConflictError,
    NameConflictError,
    NamespaceEndsError,
    UnavailableError,
)
from vlm_operator.plan import pool_claim
from vlm_operator.reconcile.accepted_spec import object_name as state_name
from vlm_operator.reconcile.decisions import Intent
from vlm_operator.reconcile.retries import CHILD, TEMPLATE, Retries
from vlm_operator.state import ANNOTATION_APPLIED, Observed
from vlm_operator.status import Failure, Told
from vlm_operator.status.causes import sentence


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of an intent.

    Attributes:
        failure: the first thing that went wrong, None where nothing did.
        wrote: whether anything was written.
        answers: children as they were written, by kind and name.
        pending: a paused service's plan differs from what is there.
    """

    failure: Failure | None
    wrote: bool
    answers: Mapping[tuple[str, str], Manifest] = dataclasses.field(default_factory=dict)
    pending: bool = False


async def carry_out(
    cluster: Cluster,
    intent: Intent,
    observed: Observed,
    *,
    accepted: Accepted,
    retries: Retries,
) -> Done:
    """Write whatever differs; what was refused lately waits for its own next try.

    Once the namespace is being deleted, nothing is written any more.

    Raises:
        UnavailableError, ConflictError, LeaseLostError: the turn ends here; the next one goes on.
    """
    if not accepted.ends:
        try:
            return await _carry_out(cluster, intent, observed, accepted, retries)
        except NamespaceEndsError:
            accepted.ends = True
    message = "the namespace is being deleted: nothing is created there any more"
    return Done(Failure(Told.DELETING_NAMESPACE, message, person=False), wrote=False)


async def _carry_out(
    cluster: Cluster, intent: Intent, observed: Observed, accepted: Accepted, retries: Retries
) -> Done:
    service = intent.service
    count = await apply_gates(cluster, intent.gates, namespace=service.namespace, now=observed.now)
    if service.spec.paused:
        return Done(None, bool(count), pending=_differs(intent, observed))
    refused = await _refused_template(cluster, intent, observed, retries)
    if refused is not None:
        return Done(refused, bool(count))
    conflicts: list[NameConflictError] = []
    unclaimed: list[tuple[str, ClusterError]] = []
    claimed: dict[tuple[str, str], Manifest] = {}
    for role, number in intent.claims.items():
        claim = pool_claim(service, role, number)
        try:
            answer = await claim_pool(cluster, claim, observed, uid=service.uid)
            claimed[names.KIND_POOL, claim["metadata"]["name"]] = answer
        except NameConflictError as error:
            conflicts.append(error)
        except (UnavailableError, ConflictError, NamespaceEndsError):
            raise
        except ClusterError as error:
            unclaimed.append((names.child(service.name, role), error))
    skipped = {error.name for error in conflicts} | {name for name, _ in unclaimed}
    objects, waiting = _due(
        [
            item
            for item in intent.plan.objects
            if item["kind"] != names.KIND_POOL or item["metadata"]["name"] not in skipped
        ],
        retries,
        now=observed.now,
    )
    applied = await apply_plan(
        cluster,
        objects,
        observed,
        namespace=service.namespace,
        uid=service.uid,
        accepted=accepted,
    )
    _note(objects, applied, retries, now=observed.now)
    own = {
        (CONFIG_MAP.kind, names.child(service.name, "autoscaler")),
        (CONFIG_MAP.kind, state_name(service.name)),
    }
    gone = await prune(
        cluster,
        observed,
        intent.plan.named | own,
        namespace=service.namespace,
    )
    refused_claims = tuple((f"{names.KIND_POOL} {name}", error) for name, error in unclaimed)
    applied = dataclasses.replace(
        applied,
        conflicts=(*conflicts, *applied.conflicts),
        refused=(*refused_claims, *applied.refused),
    )
    answers = {**claimed, **applied.written}
    return Done(_failure(applied) or waiting, bool(count or answers or gone), answers)


def _due(
    objects: Sequence[Manifest], retries: Retries, *, now: float
) -> tuple[tuple[Manifest, ...], Failure | None]:
    """What is written now, and the failure of the first object that waits for its next try."""
    due, waiting = [], None
    for item in objects:
        held = retries.held(_label(item), item, now=now)
        if held is None:
            due.append(item)
        else:
            waiting = waiting or held
    return tuple(due), waiting


def _note(objects: Sequence[Manifest], applied: Applied, retries: Retries, *, now: float) -> None:
    """Note what became of each object that was tried."""
    failures = {f"{error.kind} {error.name}": _conflict(error) for error in applied.conflicts}
    failures |= {label: _refusal(label, error) for label, error in applied.refused}
    for item in objects:
        label = _label(item)
        failure = failures.get(label)
        if failure is None:
            retries.succeeded(label)
        else:
            retries.failed(label, item, failure, backoff=CHILD, now=now)


def _label(item: Manifest) -> str:
    return f"{item['kind']} {item['metadata']['name']}"


async def _refused_template(
    cluster: Cluster, intent: Intent, observed: Observed, retries: Retries
) -> Failure | None:
    """Ask the API server about Deployments that do not exist yet, before anything is written.

    Placement is the user's own and only the API server knows whether it is right.
    """
    for manifest in intent.plan.objects:
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
            failure = Failure(Told.TEMPLATE_REFUSED, message, accepted=False)
            retries.failed(label, manifest, failure, backoff=TEMPLATE, now=observed.now)
            return failure
    return None


def _differs(intent: Intent, observed: Observed) -> bool:
    """Whether a child is missing, or was made from another manifest than today's."""
    for manifest in intent.plan.objects:
        live = observed.child(manifest["kind"], manifest["metadata"]["name"])
        noted = {} if live is None else live["metadata"].get("annotations", {})
        wanted = stamped(manifest)["metadata"]["annotations"][ANNOTATION_APPLIED]
        if noted.get(ANNOTATION_APPLIED) != wanted:
            return True
    return False


def _failure(applied: Applied) -> Failure | None:
    if applied.conflicts:
        return _conflict(applied.conflicts[0])
    if applied.refused:
        return _refusal(*applied.refused[0])
    return None


def _conflict(error: NameConflictError) -> Failure:
    return Failure(Told.NAME_CONFLICT, str(error))


def _refusal(label: str, error: ClusterError) -> Failure:
    said = f"{label}: {error.reason or 'refused'}: {error.message.replace('; ', ', ')}"
    return Failure(Told.CHILD_REFUSED, sentence(said, "correct what refuses it"))
