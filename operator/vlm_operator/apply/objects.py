"""Applies objects that differ from the plan, in its order; prunes those that it no longer names.

An object is read before it is first applied. If our service is not its controller, it is not
changed and reported as a NameConflict. The rest of the plan is still applied.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_operator import names
from vlm_operator.apply.compare import Drift, drift, patch, with_digest
from vlm_operator.apply.learned import Learned
from vlm_operator.apply.sync_state import Key, SyncState, current, due, repaired
from vlm_operator.cluster import CHILD_KINDS, Cluster, Manifest, kind_of
from vlm_operator.errors import (
    ENDS_TURN,
    ClusterError,
    NameConflictError,
    NamespaceEndsError,
    UnavailableError,
)
from vlm_operator.metrics import WRITES
from vlm_operator.state import Observed, owned_by
from vlm_operator.state.deployments import ANNOTATION_APPLIED

logger = logging.getLogger(__name__)


async def apply_plan(
    cluster: Cluster,
    objects: Sequence[Manifest],
    observed: Observed,
    *,
    uid: str,
    sync_state: SyncState,
) -> tuple[dict[Key, Manifest], dict[Key, NameConflictError | ClusterError]]:
    """Write every object that differs from its manifest, in the plan's order.

    Objects that the service with `uid` does not control are never written. `sync_state` is updated.

    Returns:
        The written objects, and the errors of others, each by kind and name.

    Raises:
        UnavailableError, ConflictError, NamespaceEndsError, LeaseLostError: the turn must end.
    """
    written: dict[Key, Manifest] = {}
    errors: dict[Key, NameConflictError | ClusterError] = {}
    sync_state.write_conflicts = current(sync_state.write_conflicts, now=observed.now)
    for manifest in objects:
        key = key_of(manifest)
        try:
            live = await _owned(cluster, observed, manifest, uid)
            answer = await _apply(
                cluster, manifest, live, key=key, uid=uid, sync_state=sync_state, now=observed.now
            )
            if answer is not None:
                written[key] = answer
        except ENDS_TURN:
            raise
        except (NameConflictError, ClusterError) as error:
            errors[key] = error
    return written, errors


async def check_new(cluster: Cluster, manifest: Manifest) -> ClusterError | None:
    """Dry-run a Deployment; returns why its pod template cannot be used, None if it can.

    The API server refuses it, or drops a part whose feature gate is off.

    Raises:
        UnavailableError: the API server is unreachable.
        NamespaceEndsError: the namespace is being deleted.
    """
    try:
        answer = await cluster.apply(manifest, manager=names.MANAGER, dry_run=True)
    except NamespaceEndsError:
        raise
    except UnavailableError as error:
        # the API server answers 500, not 400, to an unknown field
        if "failed to create typed patch object" in error.message:
            return error
        raise
    except ClusterError as error:
        return error if error.status in (400, 422) else None
    lost = dropped(manifest, answer)
    if lost is None:
        return None
    return ClusterError(422, "Dropped", f"{lost}: the API server drops it, it lacks this feature")


def dropped(manifest: Manifest, answer: Manifest) -> str | None:
    """Return the path of the first volume or claim of a pod template that the answer lacks."""
    for field in ("volumes", "resourceClaims"):
        wanted, kept = (
            [item["name"] for item in one["spec"]["template"]["spec"].get(field, ())]
            for one in (manifest, answer)
        )
        lost = next((name for name in wanted if name not in kept), None)
        if lost is not None:
            return f"spec.template.spec.{field}[{lost}]"
    return None


async def apply_replicas(
    cluster: Cluster, manifest: Manifest, observed: Observed, *, uid: str
) -> Manifest:
    """Write the autoscaler's replica count into a VLMPool, creating it if missing; returns it.

    Raises:
        NameConflictError: an object of that name has another controller.
    """
    await _owned(cluster, observed, manifest, uid)
    answer = await cluster.apply(manifest, manager=names.MANAGER_AUTOSCALER)
    WRITES.labels(kind=manifest["kind"], verb="apply").inc()
    check_owner(answer, key_of(manifest), uid)
    return answer


async def prune(
    cluster: Cluster, observed: Observed, keep: frozenset[Key], *, namespace: str
) -> bool:
    """Delete children that the plan no longer names; returns whether there were any.

    The order is the reverse of `CHILD_KINDS`, so owners of pods come first.
    """
    pruned = False
    for kind in reversed(CHILD_KINDS):
        for live in observed.of_kind(kind.kind):
            meta = live["metadata"]
            if (kind.kind, meta["name"]) in keep or "deletionTimestamp" in meta:
                continue
            await cluster.delete(kind, namespace, meta["name"], uid=meta["uid"])
            WRITES.labels(kind=kind.kind, verb="delete").inc()
            logger.info("pruned", extra={"kind": kind.kind, "object": meta["name"]})
            pruned = True
    return pruned


async def _apply(
    cluster: Cluster,
    manifest: Manifest,
    live: Manifest | None,
    *,
    key: tuple[str, str],
    uid: str,
    sync_state: SyncState,
    now: float,
) -> Manifest | None:
    """Apply one object if it differs; returns the API server's answer, None if not written."""
    wanted = with_digest(manifest)
    digest = wanted["metadata"]["annotations"][ANNOTATION_APPLIED]
    drifts: tuple[Drift, ...] = ()
    if live is not None:
        if "deletionTimestamp" in live["metadata"]:
            return None  # being deleted: a later turn creates it again
        version = digest, live["metadata"].get("resourceVersion")
        if sync_state.compared.get(key) == version:
            return None
        settled = sync_state.settled.get(key)
        accepted = settled[1] if settled is not None and settled[0] == digest else frozenset()
        drifts = await _drift(cluster, live, wanted, digest, learned=sync_state.learned, now=now)
        drifts = tuple(item for item in drifts if item.path not in accepted)
        if not drifts:
            sync_state.digests[key] = digest
            sync_state.compared[key] = version
            return None
        # precondition: the object that we compared, not a newer one with its name
        wanted["metadata"]["uid"] = live["metadata"]["uid"]
        paths = [item.path for item in drifts]
        logger.info("differs", extra={"kind": key[0], "object": key[1], "fields": paths})
    if sync_state.digests.get(key) == digest:  # it was in sync, and another writer changed it
        if due(sync_state.write_conflicts, key, now=now) > 0:
            return None
        field = drifts[0].path if drifts else "its existence"
        sync_state.write_conflicts = repaired(sync_state.write_conflicts, key, field, now=now)
        if drifts:
            sync_state.note_drift(key, drifts)
    answer, remaining = await _write(cluster, wanted, live, drifts, sync_state.learned)
    sync_state.digests[key] = digest
    WRITES.labels(kind=key[0], verb="apply").inc()
    check_owner(answer, key, uid)
    if remaining:
        sync_state.settled[key] = (digest, frozenset(item.path for item in remaining))
    else:
        sync_state.settled.pop(key, None)
    return answer


async def _drift(
    cluster: Cluster, live: Manifest, wanted: Manifest, digest: str, *, learned: Learned, now: float
) -> tuple[Drift, ...]:
    """Return the drift of one object; send a dry run only if an added field is unknown."""
    drifts = drift(live, wanted, learned.known(wanted))
    if not any(item.added for item in drifts):
        return drifts
    return drift(live, wanted, await learned.ask(cluster, wanted, digest, now=now))


async def _write(
    cluster: Cluster,
    wanted: Manifest,
    live: Manifest | None,
    drifts: tuple[Drift, ...],
    learned: Learned,
) -> tuple[Manifest, tuple[Drift, ...]]:
    """Apply the manifest, and remove fields that others added, which an apply keeps.

    Returns:
        The object, and the drift that the API server itself causes with each write.
    """
    answers = learned.known(wanted)
    added = tuple(item for item in drifts if item.added)
    if live is not None and _must_be_recreated(live, wanted):
        meta = live["metadata"]
        await cluster.delete(kind_of(wanted), meta["namespace"], meta["name"], uid=meta["uid"])
        wanted["metadata"].pop("uid")
        return await cluster.apply(wanted, manager=names.MANAGER), ()
    if not added:
        try:
            answer = await cluster.apply(wanted, manager=names.MANAGER)
            remaining = _drift_after_write(answer, wanted, answers) if live is not None else ()
            if not remaining:
                return answer, ()
        except ClusterError as error:
            if live is None or error.status != 422:
                raise
            remaining = drifts
        added = remaining
    WRITES.labels(kind=wanted["kind"], verb="merge").inc()
    merged = await cluster.merge(patch(wanted, added), manager=names.MANAGER)
    persistent = {item.path for item in _drift_after_write(merged, wanted, answers)}
    answer = await cluster.apply(wanted, manager=names.MANAGER)
    # drift outside of `persistent` comes from a concurrent writer: the next turn repairs it
    return answer, tuple(
        item for item in _drift_after_write(answer, wanted, answers) if item.path in persistent
    )


def _drift_after_write(
    answer: Manifest, wanted: Manifest, answers: Sequence[Manifest]
) -> tuple[Drift, ...]:
    """Return the drift in the answer to our write; added fields count only if some are learned."""
    bare = {**wanted, "metadata": {k: v for k, v in wanted["metadata"].items() if k != "uid"}}
    return drift(answer, bare, answers or None)


def _must_be_recreated(live: Manifest, wanted: Manifest) -> bool:
    """Whether the object must be recreated, because the `roleRef` of a binding is immutable."""
    return "roleRef" in wanted and live.get("roleRef") != wanted["roleRef"]


async def _owned(
    cluster: Cluster, observed: Observed, manifest: Manifest, uid: str
) -> Manifest | None:
    """Return the object that a manifest describes; None if it does not exist.

    Raises:
        NameConflictError: an object of that name has another controller.
    """
    key, namespace = key_of(manifest), manifest["metadata"]["namespace"]
    live = observed.children.get(key) or observed.foreign.get(key)
    if live is None:
        live = await cluster.get(kind_of(manifest), namespace, key[1])
    check_owner(live, key, uid)
    return live


def key_of(item: Manifest) -> Key:
    return item["kind"], item["metadata"]["name"]


def check_owner(live: Manifest | None, key: tuple[str, str], uid: str) -> None:
    """Raise `NameConflictError` for an object that our service does not control."""
    if live is None or owned_by(live, uid):
        return
    owners: list[Mapping[str, Any]] = live["metadata"].get("ownerReferences", [])
    whose = f"{owners[0]['kind']} {owners[0]['name']}" if owners else None
    raise NameConflictError(*key, whose)
