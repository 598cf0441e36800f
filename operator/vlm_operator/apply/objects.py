"""Apply what differs from the plan, in its order; prune what it no longer names.

An object is read before it is first applied. One that another owner holds, or none, is a
NameConflict: it is left alone and reported. Everything else of the plan is still applied.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_operator import names
from vlm_operator.apply.compare import Drift, drift, patch, stamped
from vlm_operator.apply.contest import Contests, Key, current, due, repaired
from vlm_operator.apply.learned import Learned
from vlm_operator.cluster import CHILD_KINDS, Cluster, Manifest, kind_of
from vlm_operator.errors import ClusterError, ConflictError, NameConflictError, UnavailableError
from vlm_operator.metrics import WRITES
from vlm_operator.state import ANNOTATION_APPLIED, Observed, owned_by

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Accepted:
    """What became of our manifests, by kind and name. Written by `apply_plan` alone.

    Attributes:
        kept: a digest, and the paths at which the answer to our own write differed from it: the
            API server's own ways are no drift.
        digests: what was last found or put as wanted.
        compared: a digest and the version of an object that was as it says: it still is.
        contests: what somebody else changed since.
        news: what was put right since the loop last asked, for people.
        learned: what the API server adds by itself.
    """

    kept: dict[Key, tuple[str, frozenset[str]]] = dataclasses.field(default_factory=dict)
    digests: dict[Key, str] = dataclasses.field(default_factory=dict)
    compared: dict[Key, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    contests: Contests = dataclasses.field(default_factory=dict)
    news: list[str] = dataclasses.field(default_factory=list)
    learned: Learned = dataclasses.field(default_factory=Learned)

    def told(self) -> tuple[str, ...]:
        """Hand over the news, once."""
        found = tuple(self.news)
        self.news.clear()
        return found


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
        except (UnavailableError, ConflictError):
            raise
        except ClusterError as error:
            refused.append((label, error))
    return Applied(written, tuple(conflicts), tuple(refused))


async def check_new(cluster: Cluster, manifest: Manifest) -> ClusterError | None:
    """Ask the API server whether it would take an object; its refusal, or None if it would.

    Raises:
        UnavailableError: it could not be asked.
    """
    try:
        await cluster.apply(manifest, manager=names.MANAGER, dry_run=True)
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
        found = await _drift(cluster, live, wanted, digest, accepted=accepted, now=now)
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
            accepted.news.append(f"{key[0]} {key[1]}: {_listed(found)} changed; put back")
    answer, left = await _write(cluster, wanted, live, found, accepted.learned)
    accepted.digests[key] = digest
    WRITES.labels(kind=key[0], verb="apply").inc()
    _check_owner(answer, key, uid)
    if left:
        accepted.kept[key] = (digest, frozenset(item.path for item in left))
    else:
        accepted.kept.pop(key, None)
    return answer


async def _drift(
    cluster: Cluster,
    live: Manifest,
    wanted: Manifest,
    digest: str,
    *,
    accepted: Accepted,
    now: float,
) -> tuple[Drift, ...]:
    """Compare; ask what the API server adds by itself only if an addition is not known yet."""
    found = drift(live, wanted, accepted.learned.known(wanted))
    if not any(item.added for item in found):
        return found
    return drift(live, wanted, await accepted.learned.ask(cluster, wanted, digest, now=now))


async def _write(
    cluster: Cluster,
    wanted: Manifest,
    live: Manifest | None,
    found: tuple[Drift, ...],
    learned: Learned,
) -> tuple[Manifest, tuple[Drift, ...]]:
    """Apply, and take out what others added, which an apply leaves.

    Returns:
        The object, and what the API server itself made of one write of ours and will again.
    """
    answers = learned.known(wanted)
    added = tuple(item for item in found if item.added)
    if live is not None and _fixed(live, wanted):
        meta = live["metadata"]
        await cluster.delete(kind_of(wanted), meta["namespace"], meta["name"], uid=meta["uid"])
        wanted["metadata"].pop("uid")
        return await cluster.apply(wanted, manager=names.MANAGER), ()
    if not added:
        try:
            answer = await cluster.apply(wanted, manager=names.MANAGER)
            left = _left(answer, wanted, answers) if live is not None else ()
            if not left:
                return answer, ()
        except ClusterError as error:
            if live is None or error.status != 422:
                raise
            left = found
        added = left
    WRITES.labels(kind=wanted["kind"], verb="merge").inc()
    merged = await cluster.merge(patch(wanted, added), manager=names.MANAGER)
    kept = {item.path for item in _left(merged, wanted, answers)}
    answer = await cluster.apply(wanted, manager=names.MANAGER)
    # what is different only now was written in between: that is for the next turn
    return answer, tuple(item for item in _left(answer, wanted, answers) if item.path in kept)


def _left(answer: Manifest, wanted: Manifest, answers: Sequence[Manifest]) -> tuple[Drift, ...]:
    """What of our own write is not as written; additions count only if defaults are known."""
    bare = {**wanted, "metadata": {k: v for k, v in wanted["metadata"].items() if k != "uid"}}
    return drift(answer, bare, answers or None)


def _fixed(live: Manifest, wanted: Manifest) -> bool:
    """Whether only a new object can be as wanted: a binding's role cannot be changed."""
    return "roleRef" in wanted and live.get("roleRef") != wanted["roleRef"]


def _listed(found: tuple[Drift, ...]) -> str:
    rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(item.path for item in found[:3]) + rest


def _check_owner(live: Manifest | None, key: tuple[str, str], uid: str) -> None:
    """Raise `NameConflictError` for an object that our service does not control."""
    if live is None or owned_by(live, uid):
        return
    owners: list[Mapping[str, Any]] = live["metadata"].get("ownerReferences", [])
    whose = f"{owners[0]['kind']} {owners[0]['name']}" if owners else None
    raise NameConflictError(*key, whose)
