"""Carrying an intent out. The order is such that a cut between any two writes does no harm.

gates    a pod is told before its Deployment shrinks, and opened before anything waits for it
claims   a VLMPool exists, with its number, before the operator adds the rest
plan     accounts and configuration before the pods that read them
prune    what nobody names any more, last
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, Cluster, Manifest
from vlm_operator.errors import (
    ClusterError,
    ConflictError,
    NameConflictError,
    UnavailableError,
)
from vlm_operator.plan import pool_claim
from vlm_operator.reconcile.decisions import Intent
from vlm_operator.state import Observed
from vlm_operator.status import Failure, Told


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of an intent.

    Attributes:
        failure: the first thing that went wrong, None where nothing did.
        wrote: whether anything was written.
        answers: children as they were written, by kind and name.
    """

    failure: Failure | None
    wrote: bool
    answers: Mapping[tuple[str, str], Manifest] = dataclasses.field(default_factory=dict)


async def carry_out(
    cluster: Cluster, intent: Intent, observed: Observed, *, accepted: Accepted
) -> Done:
    """Write whatever differs.

    Raises:
        UnavailableError, ConflictError, LeaseLostError: the turn ends here; the next one goes on.
    """
    service = intent.service
    count = await apply_gates(cluster, intent.gates, namespace=service.namespace, now=observed.now)
    if service.spec.paused:
        return Done(None, bool(count))
    refused = await _refused_template(cluster, intent, observed)
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
        except (UnavailableError, ConflictError):
            raise
        except ClusterError as error:
            unclaimed.append((names.child(service.name, role), error))
    skipped = {error.name for error in conflicts} | {name for name, _ in unclaimed}
    objects = tuple(
        item
        for item in intent.plan.objects
        if item["kind"] != names.KIND_POOL or item["metadata"]["name"] not in skipped
    )
    applied = await apply_plan(
        cluster,
        objects,
        observed,
        namespace=service.namespace,
        uid=service.uid,
        accepted=accepted,
    )
    memory = (CONFIG_MAP.kind, names.child(service.name, "autoscaler"))
    gone = await prune(
        cluster,
        observed,
        intent.plan.named | {memory},
        namespace=service.namespace,
    )
    refused_claims = tuple((f"{names.KIND_POOL} {name}", error) for name, error in unclaimed)
    applied = dataclasses.replace(
        applied,
        conflicts=(*conflicts, *applied.conflicts),
        refused=(*refused_claims, *applied.refused),
    )
    answers = {**claimed, **applied.written}
    return Done(_failure(applied), bool(count or answers or gone), answers)


async def _refused_template(cluster: Cluster, intent: Intent, observed: Observed) -> Failure | None:
    """Ask the API server about Deployments that do not exist yet, before anything is written.

    Placement is the user's own and only the API server knows whether it is right.
    """
    for manifest in intent.plan.objects:
        name = manifest["metadata"]["name"]
        if manifest["kind"] != DEPLOYMENT.kind or observed.child(DEPLOYMENT.kind, name):
            continue
        error = await check_new(cluster, manifest)
        if error is not None:
            labels = manifest["metadata"]["labels"]
            role, variant = labels[names.LABEL_ROLE], labels.get(names.LABEL_VARIANT)
            place = f"spec.pools.{role}.variants[{variant}]" if variant else f"spec.{role}"
            return Failure("PodTemplateRefused", f"{place}: {error.message}", accepted=False)
    return None


def _failure(applied: Applied) -> Failure | None:
    if applied.conflicts:
        return Failure(Told.NAME_CONFLICT, str(applied.conflicts[0]))
    if applied.refused:
        label, error = applied.refused[0]
        if _ending_namespace(error):
            message = "the namespace is being deleted"
            return Failure("NamespaceTerminating", message, person=False)
        return Failure(error.reason or "Refused", f"{label}: {error.message}")
    return None


def _ending_namespace(error: ClusterError) -> bool:
    return error.status == 403 and "being terminated" in error.message
