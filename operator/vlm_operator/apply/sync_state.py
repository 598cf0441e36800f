"""State of one loop's writes, so that it does not repeat them or fight another writer."""

from __future__ import annotations

import dataclasses

from vlm_operator import names
from vlm_operator.apply.compare import Drift
from vlm_operator.apply.learned import Learned
from vlm_operator.apply.write_conflicts import Key, WriteConflicts

_RESTART_HINT = f"; to replace pods, annotate the VLMService with {names.ANNOTATION_RESTARTED_AT}"
_RESTARTED = "spec.template.metadata.annotations"
"""Field that `kubectl rollout restart` writes."""


@dataclasses.dataclass
class SyncState:
    """State of our manifests, by kind and name. `apply_plan` writes it; `execute` sets `ends`.

    Attributes:
        settled: digest, and paths at which the answer to our own write differs from the manifest.
            The API server causes these differences, so they are not drift.
        digests: digest of the manifest that the object last agreed with.
        compared: digest and resourceVersion of the last comparison that found no drift. The object
            is not compared again while both are the same.
        write_conflicts: repairs of changes by other writers.
        ends: whether the namespace is being deleted. A new service in a later namespace of the
            same name has another loop.
        news: messages about repairs since the last `take_news`.
        learned: answers to dry runs, shared by all loops.
    """

    settled: dict[Key, tuple[str, frozenset[str]]] = dataclasses.field(default_factory=dict)
    digests: dict[Key, str] = dataclasses.field(default_factory=dict)
    compared: dict[Key, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    write_conflicts: WriteConflicts = dataclasses.field(default_factory=dict)
    ends: bool = False
    news: list[str] = dataclasses.field(default_factory=list)
    learned: Learned = dataclasses.field(default_factory=Learned)

    def note_drift(self, key: Key, found: tuple[Drift, ...]) -> None:
        """Add a message that changes by another writer are being reverted."""
        rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
        paths = ", ".join(item.path for item in found[:3])
        restarted = any(item.path.startswith(_RESTARTED) for item in found)
        hint = _RESTART_HINT if restarted else ""
        self.news.append(f"{key[0]} {key[1]}: {paths}{rest} changed; put back{hint}")

    def take_news(self) -> tuple[str, ...]:
        """Return and clear the messages about repairs."""
        found = tuple(self.news)
        self.news.clear()
        return found
