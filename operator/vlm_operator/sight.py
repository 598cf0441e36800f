"""Detects dead watches of kopf: compares its events with lists of VLMServices.

A watch that is dead without an error looks like a quiet cluster. It counts as dead if a list has a
new or changed service for which no event came, and no event came for any other service since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import Manifest

Signature = tuple[object, ...]
# Annotations by which users request a turn.
WAKING_ANNOTATIONS = (names.ANNOTATION_RESTARTED_AT, f"{names.GROUP}/reconcile-at")


def signature(meta: Mapping[str, Any]) -> Signature:
    """Return the part of a VLMService's metadata whose change wakes its loop.

    A status write does not change it.
    """
    notes = meta.get("annotations") or {}
    return (
        meta.get("uid"),
        meta.get("generation"),
        meta.get("deletionTimestamp"),
        tuple(meta.get("finalizers") or ()),
        tuple(notes.get(key) for key in WAKING_ANNOTATIONS),
    )


class Sight:
    """The received events of VLMServices, and the time since which one is missing.

    One event loop writes it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, int] = {}  # uid → generation
        self._told_at = clock()
        self._untold_since: float | None = None

    def told(self, uid: str, generation: int) -> None:
        """Record an event of a service."""
        self._told[uid] = generation
        self._told_at = self._clock()

    def compare(self, services: Iterable[Manifest]) -> None:
        """Compare a list of VLMServices with the events; forget services that it lacks.

        Once an event of a service came, no further event is expected if the service is being
        deleted: its events wait for its drain.
        """
        listed = {item["metadata"]["uid"]: item["metadata"] for item in services}
        self._told = {uid: seen for uid, seen in self._told.items() if uid in listed}
        untold = any(
            self._told.get(uid) != meta["generation"]
            for uid, meta in listed.items()
            if uid not in self._told or "deletionTimestamp" not in meta
        )
        if not untold:
            self._untold_since = None
        elif self._untold_since is None:
            self._untold_since = self._clock()

    @property
    def blind_seconds(self) -> float:
        """Seconds for which an event has been missing and no other event came; 0 if none is."""
        if self._untold_since is None:
            return 0.0
        return self._clock() - max(self._untold_since, self._told_at)
