"""Finds what differs between one object and its manifest, and repairs it."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_operator import names
from vlm_operator.apply.compare import Drift, drift, patch
from vlm_operator.apply.learned import Learned
from vlm_operator.cluster import Cluster, Manifest, kind_of
from vlm_operator.errors import ClusterError
from vlm_operator.metrics import WRITES


async def changes(
    cluster: Cluster,
    live: Manifest,
    wanted: Manifest,
    digest: str,
    *,
    learned: Learned,
    now: float,
) -> tuple[Drift, ...]:
    """Return the drift of one object; send a dry run only if an added field is unknown."""
    found = drift(live, wanted, learned.known(wanted))
    if not any(item.added for item in found):
        return found
    return drift(live, wanted, await learned.ask(cluster, wanted, digest, now=now))


async def write(
    cluster: Cluster,
    wanted: Manifest,
    live: Manifest | None,
    found: tuple[Drift, ...],
    learned: Learned,
) -> tuple[Manifest, tuple[Drift, ...]]:
    """Apply the manifest, and remove fields that others added, which an apply keeps.

    Returns:
        The object, and the drift that the API server itself causes with each write.
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
    # drift outside of `kept` comes from a concurrent writer: the next turn repairs it
    return answer, tuple(item for item in _left(answer, wanted, answers) if item.path in kept)


def _left(answer: Manifest, wanted: Manifest, answers: Sequence[Manifest]) -> tuple[Drift, ...]:
    """Return the drift in the answer to our write; added fields count only if some are learned."""
    bare = {**wanted, "metadata": {k: v for k, v in wanted["metadata"].items() if k != "uid"}}
    return drift(answer, bare, answers or None)


def _fixed(live: Manifest, wanted: Manifest) -> bool:
    """Whether the object must be recreated, because the `roleRef` of a binding is immutable."""
    return "roleRef" in wanted and live.get("roleRef") != wanted["roleRef"]
