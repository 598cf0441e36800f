"""Applies objects that differ from the plan, in its order; prunes those that it no longer names.

An object is read before it is first applied. If our service is not its controller, it is not
changed and reported as a NameConflict. The rest of the plan is still applied.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.apply.compare import Drift, with_digest
from vlm_operator.apply.repair import changes, write
from vlm_operator.apply.sync_state import SyncState
from vlm_operator.apply.write_conflicts import Key, current, due, repaired
from vlm_operator.cluster import CHILD_KINDS, Cluster, Manifest, kind_of
from vlm_operator.errors import (
    ClusterError,
    ConflictError,
    NameConflictError,
    NamespaceEndsError,
    UnavailableError,
)
from vlm_operator.metrics import WRITES
from vlm_operator.state import ANNOTATION_APPLIED, Observed, owned_by

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Applied:
    """Result of applying one plan.

    Attributes:
        written: answers of the API server to writes, by kind and name.
        conflicts: objects that our service does not control.
        refused: pairs of "kind name" and the API server's error.
    """

    written: Mapping[Key, Manifest]
    conflicts: tuple[NameConflictError, ...]
    refused: tuple[tuple[str, ClusterError], ...]


async def apply_plan(
    cluster: Cluster,
    objects: tuple[Manifest, ...],
    observed: Observed,
    *,
    namespace: str,
    uid: str,
    sync_state: SyncState,
) -> Applied:
    """Write every object that differs from its manifest.

    Args:
        cluster: cluster to write to.
        objects: manifests of the plan, in its order.
        observed: the view that the plan is based on.
        namespace: namespace of the service.
        uid: uid of the service; objects that it does not control are never written.
        sync_state: the loop's state of earlier writes; this function updates it.

    Raises:
        UnavailableError, ConflictError, NamespaceEndsError, LeaseLostError: the turn must end.
    """
    written: dict[Key, Manifest] = {}
    conflicts, refused = [], []
    sync_state.write_conflicts = current(sync_state.write_conflicts, now=observed.now)
    for manifest in objects:
        key = (manifest["kind"], manifest["metadata"]["name"])
        label = f"{key[0]} {key[1]}"
        try:
            live = observed.children.get(key) or observed.foreign.get(key)
            if live is None:
                live = await cluster.get(kind_of(manifest), namespace, key[1])
            check_owner(live, key, uid)
            answer = await _apply(
                cluster, manifest, live, key=key, uid=uid, sync_state=sync_state, now=observed.now
            )
            if answer is not None:
                written[key] = answer
        except NameConflictError as error:
            conflicts.append(error)
        except (UnavailableError, ConflictError, NamespaceEndsError):
            raise
        except ClusterError as error:
            refused.append((label, error))
    return Applied(written, tuple(conflicts), tuple(refused))


async def check_new(cluster: Cluster, manifest: Manifest) -> ClusterError | None:
    """Dry-run an object; returns the API server's refusal of its fields, None if there is none.

    Raises:
        UnavailableError: the API server is unreachable.
        NamespaceEndsError: the namespace is being deleted.
    """
    try:
        await cluster.apply(manifest, manager=names.MANAGER, dry_run=True)
    except NamespaceEndsError:
        raise
    except UnavailableError as error:
        # the API server answers 500, not 400, to an unknown field
        if "failed to create typed patch object" in error.message:
            return error
        raise
    except ClusterError as error:
        return error if error.status in (400, 422) else None
    return None


async def apply_replicas(
    cluster: Cluster, claim: Manifest, observed: Observed, *, uid: str
) -> Manifest:
    """Write the autoscaler's replica count into a VLMPool, creating it if missing; returns it.

    Raises:
        NameConflictError: an object of that name has another controller.
    """
    key = (claim["kind"], claim["metadata"]["name"])
    live = observed.children.get(key) or observed.foreign.get(key)
    if live is None:
        live = await cluster.get(kind_of(claim), claim["metadata"]["namespace"], key[1])
    check_owner(live, key, uid)
    answer = await cluster.apply(claim, manager=names.MANAGER_AUTOSCALER)
    WRITES.labels(kind=key[0], verb="apply").inc()
    check_owner(answer, key, uid)
    return answer


async def prune(
    cluster: Cluster,
    observed: Observed,
    keep: frozenset[tuple[str, str]],
    *,
    namespace: str,
) -> tuple[str, ...]:
    """Delete children that the plan no longer names; returns each as "kind name".

    The order is the reverse of `CHILD_KINDS`, so owners of pods come first.
    """
    gone = []
    for kind in reversed(CHILD_KINDS):
        for live in observed.of_kind(kind.kind):
            meta = live["metadata"]
            if (kind.kind, meta["name"]) in keep or "deletionTimestamp" in meta:
                continue
            await cluster.delete(kind, namespace, meta["name"], uid=meta["uid"])
            WRITES.labels(kind=kind.kind, verb="delete").inc()
            logger.info("pruned", extra={"kind": kind.kind, "object": meta["name"]})
            gone.append(f"{kind.kind} {meta['name']}")
    return tuple(gone)


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
    found: tuple[Drift, ...] = ()
    if live is not None:
        if "deletionTimestamp" in live["metadata"]:
            return None  # being deleted: a later turn creates it again
        version = digest, live["metadata"].get("resourceVersion")
        if sync_state.compared.get(key) == version:
            return None
        known = sync_state.settled.get(key)
        kept = known[1] if known is not None and known[0] == digest else frozenset()
        found = await changes(cluster, live, wanted, digest, learned=sync_state.learned, now=now)
        found = tuple(item for item in found if item.path not in kept)
        if not found:
            sync_state.digests[key] = digest
            sync_state.compared[key] = version
            return None
        # precondition: the object that we compared, not a newer one with its name
        wanted["metadata"]["uid"] = live["metadata"]["uid"]
        paths = [item.path for item in found]
        logger.info("differs", extra={"kind": key[0], "object": key[1], "fields": paths})
    if sync_state.digests.get(key) == digest:  # it was in sync, and another writer changed it
        if due(sync_state.write_conflicts, key, now=now) > 0:
            return None
        field = found[0].path if found else "its existence"
        sync_state.write_conflicts = repaired(sync_state.write_conflicts, key, field, now=now)
        if found:
            sync_state.note_drift(key, found)
    answer, left = await write(cluster, wanted, live, found, sync_state.learned)
    sync_state.digests[key] = digest
    WRITES.labels(kind=key[0], verb="apply").inc()
    check_owner(answer, key, uid)
    if left:
        sync_state.settled[key] = (digest, frozenset(item.path for item in left))
    else:
        sync_state.settled.pop(key, None)
    return answer


def check_owner(live: Manifest | None, key: tuple[str, str], uid: str) -> None:
    """Raise `NameConflictError` for an object that our service does not control."""
    if live is None or owned_by(live, uid):
        return
    owners: list[Mapping[str, Any]] = live["metadata"].get("ownerReferences", [])
    whose = f"{owners[0]['kind']} {owners[0]['name']}" if owners else None
    raise NameConflictError(*key, whose)
