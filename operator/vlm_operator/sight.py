"""Whether kopf still tells us what happens: what its events say against what a list says.

A watch that is dead without an error looks like a quiet cluster. A list tells them apart: a service
that is there, or was changed, and of which no event came, while none came of anything else either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import Manifest

Signature = tuple[object, ...]
# What users ask for on the object itself, beside `spec`.
WAKING_ANNOTATIONS = (f"{names.GROUP}/restarted-at", f"{names.GROUP}/reconcile-at")


def signature(meta: Mapping[str, Any]) -> Signature:
    """Return what of a VLMService's metadata wakes its loop; a status write leaves it as it is."""
    notes = meta.get("annotations") or {}
    return (
        meta.get("uid"),
        meta.get("generation"),
        meta.get("deletionTimestamp"),
        tuple(meta.get("finalizers") or ()),
        tuple(notes.get(key) for key in WAKING_ANNOTATIONS),
    )


class Sight:
    """What was told of VLMServices, and since when something was not. One event loop writes it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, int] = {}  # uid → generation
        self._told_at = clock()
        self._untold_since: float | None = None

    def told(self, uid: str, generation: int) -> None:
        """An event of a service came."""
        self._told[uid] = generation
        self._told_at = self._clock()

    def compare(self, services: Iterable[Manifest]) -> None:
        """Look at what a list says; what is gone from it is forgotten.

        A service that is being deleted is not waited for: its events stand back for its drain.
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
        """For how long something has been there to be told, and nothing was told; 0 for seeing."""
        if self._untold_since is None:
            return 0.0
        return self._clock() - max(self._untold_since, self._told_at)
