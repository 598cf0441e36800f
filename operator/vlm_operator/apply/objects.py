"""Apply what differs from the plan, in its order; prune what it no longer names.

An object is read before it is first applied. One that another owner holds, or none, is a
NameConflict: it is left alone and reported. Everything else of the plan is still applied.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.apply.accepted import Accepted
from vlm_operator.apply.compare import Drift, stamped
from vlm_operator.apply.contest import Key, current, due, repaired
from vlm_operator.apply.repair import changes, write
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
    """What came of one plan.

    Attributes:
        written: what the API server answered to each write, by kind and name.
        refused: kind and name, and the server's answer.
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
    accepted: Accepted,
) -> Applied:
    """Write every object that is not as wanted.

    Args:
        cluster: where to write.
        objects: the plan's, in its order.
        observed: the view that the plan was made from.
        namespace: of the service.
        uid: of the service; what it does not control is never written.
        accepted: the loop's memory of the server's own ways.

    Raises:
        UnavailableError, LeaseLostError: nothing more can be written in this turn.
    """
    written: dict[Key, Manifest] = {}
    conflicts, refused = [], []
    accepted.contests = current(accepted.contests, now=observed.now)
    for manifest in objects:
        key = (manifest["kind"], manifest["metadata"]["name"])
        label = f"{key[0]} {key[1]}"
        try:
            live = observed.children.get(key) or observed.foreign.get(key)
            if live is None:
                live = await cluster.get(kind_of(manifest), namespace, key[1])
            _check_owner(live, key, uid)
            answer = await _apply(
                cluster, manifest, live, key=key, uid=uid, accepted=accepted, now=observed.now
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
    """Ask the API server whether it would take an object; its refusal, or None if it would.

    Raises:
        UnavailableError: it could not be asked.
        NamespaceEndsError: nothing is created there any more.
    """
    try:
        await cluster.apply(manifest, manager=names.MANAGER, dry_run=True)
    except NamespaceEndsError:
        raise
    except UnavailableError as error:
        # an unknown field is answered with 500, not with 400
        if "failed to create typed patch object" in error.message:
            return error
        raise
    except ClusterError as error:
        return error if error.status in (400, 422) else None
    return None


async def claim_pool(
    cluster: Cluster, claim: Manifest, observed: Observed, *, uid: str
) -> Manifest:
    """Write the autoscaler's number into a VLMPool, which may have to be made; returns it.

    Raises:
        NameConflictError: an object of that name is somebody else's.
    """
    key = (claim["kind"], claim["metadata"]["name"])
    live = observed.children.get(key) or observed.foreign.get(key)
    if live is None:
        live = await cluster.get(kind_of(claim), claim["metadata"]["namespace"], key[1])
    _check_owner(live, key, uid)
    answer = await cluster.apply(claim, manager=names.MANAGER_AUTOSCALER)
    WRITES.labels(kind=key[0], verb="apply").inc()
    _check_owner(answer, key, uid)
    return answer


async def prune(
    cluster: Cluster,
    observed: Observed,
    keep: frozenset[tuple[str, str]],
    *,
    namespace: str,
) -> tuple[str, ...]:
    """Delete children that the plan no longer names, pods' owners first; returns their names."""
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
    accepted: Accepted,
    now: float,
) -> Manifest | None:
    """Apply one object where it differs; returns it as written, None where nothing was."""
    wanted = stamped(manifest)
    digest = wanted["metadata"]["annotations"][ANNOTATION_APPLIED]
    found: tuple[Drift, ...] = ()
    if live is not None:
        if "deletionTimestamp" in live["metadata"]:
            return None  # on its way out: it is made anew once it is gone
        version = digest, live["metadata"].get("resourceVersion")
        if accepted.compared.get(key) == version:
            return None
        known = accepted.kept.get(key)
        kept = known[1] if known is not None and known[0] == digest else frozenset()
        found = await changes(cluster, live, wanted, digest, learned=accepted.learned, now=now)
        found = tuple(item for item in found if item.path not in kept)
        if not found:
            accepted.digests[key] = digest
            accepted.compared[key] = version
            return None
        # a precondition: the object that we looked at, not one that took its name since
        wanted["metadata"]["uid"] = live["metadata"]["uid"]
        paths = [item.path for item in found]
        logger.info("differs", extra={"kind": key[0], "object": key[1], "fields": paths})
    if accepted.digests.get(key) == digest:  # it was as wanted, and somebody changed it
        if due(accepted.contests, key, now=now) > 0:
            return None
        field = found[0].path if found else "its existence"
        accepted.contests = repaired(accepted.contests, key, field, now=now)
        if found:
            accepted.tell(key, found)
    answer, left = await write(cluster, wanted, live, found, accepted.learned)
    accepted.digests[key] = digest
    WRITES.labels(kind=key[0], verb="apply").inc()
    _check_owner(answer, key, uid)
    if left:
        accepted.kept[key] = (digest, frozenset(item.path for item in left))
    else:
        accepted.kept.pop(key, None)
    return answer


def _check_owner(live: Manifest | None, key: tuple[str, str], uid: str) -> None:
    """Raise `NameConflictError` for an object that our service does not control."""
    if live is None or owned_by(live, uid):
        return
    owners: list[Mapping[str, Any]] = live["metadata"].get("ownerReferences", [])
    whose = f"{owners[0]['kind']} {owners[0]['name']}" if owners else None
    raise NameConflictError(*key, whose)
