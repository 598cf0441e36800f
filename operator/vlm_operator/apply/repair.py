"""One object: what differs from its manifest, and the writes that put it right."""

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
    """Compare; ask what the API server adds by itself only if an addition is not known yet."""
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
