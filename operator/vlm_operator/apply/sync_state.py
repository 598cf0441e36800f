"""State of one loop's writes: it repeats no write, and does not fight another writer. Pure.

another writer changes, we repair ─▶ 5 repairs within a minute ─▶ contested: the next repair waits
                                                                  2, 4, 8 … 300 s; one Event

Repairs before that are not delayed. If a field keeps our value for ten minutes, its count is reset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.apply.compare import Drift
from vlm_operator.apply.learned import Learned

Key = tuple[str, str]  # kind, name

WINDOW_SECONDS = 60.0
REPAIRS_AT_ONCE = 5
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
FORGOTTEN_SECONDS = 600.0

_RESTART_HINT = f"; to replace pods, annotate the VLMService with {names.ANNOTATION_RESTARTED_AT}"
_RESTARTED = "spec.template.metadata.annotations"  # `kubectl rollout restart` writes it


@dataclasses.dataclass(frozen=True)
class WriteConflict:
    """Repairs of one object.

    Attributes:
        repaired: times of the last `REPAIRS_AT_ONCE` repairs, in seconds since the epoch, latest
            last.
        pause: seconds between the last repair and the next; 0 if the object is not contested.
        field: path of the field that was repaired last.
    """

    repaired: tuple[float, ...] = ()
    pause: float = 0.0
    field: str = ""

    @property
    def contested(self) -> bool:
        """Whether another writer keeps changing the object."""
        return self.pause > 0


WriteConflicts = Mapping[Key, WriteConflict]


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
        repairs: messages about repairs since the last `take_repairs`.
        learned: answers to dry runs, shared by all loops.
    """

    settled: dict[Key, tuple[str, frozenset[str]]] = dataclasses.field(default_factory=dict)
    digests: dict[Key, str] = dataclasses.field(default_factory=dict)
    compared: dict[Key, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    write_conflicts: WriteConflicts = dataclasses.field(default_factory=dict)
    ends: bool = False
    repairs: list[str] = dataclasses.field(default_factory=list)
    learned: Learned = dataclasses.field(default_factory=Learned)

    def note_drift(self, key: Key, drifts: tuple[Drift, ...]) -> None:
        rest = f" and {len(drifts) - 3} more" if len(drifts) > 3 else ""
        paths = ", ".join(item.path for item in drifts[:3])
        restarted = any(item.path.startswith(_RESTARTED) for item in drifts)
        hint = _RESTART_HINT if restarted else ""
        self.repairs.append(f"{key[0]} {key[1]}: {paths}{rest} changed; put back{hint}")

    def take_repairs(self) -> tuple[str, ...]:
        repairs = tuple(self.repairs)
        self.repairs.clear()
        return repairs


def due(write_conflicts: WriteConflicts, key: Key, *, now: float) -> float:
    """Return the seconds until an object may be repaired; 0 means now."""
    conflict = write_conflicts.get(key)
    if conflict is None or not conflict.contested:
        return 0.0
    return max(0.0, conflict.repaired[-1] + conflict.pause - now)


def repaired(
    write_conflicts: WriteConflicts, key: Key, field: str, *, now: float
) -> WriteConflicts:
    """Count a repair of `field`; `REPAIRS_AT_ONCE` within the window make the object contested."""
    before = write_conflicts.get(key, WriteConflict())
    if before.repaired and now - before.repaired[-1] >= FORGOTTEN_SECONDS:
        before = WriteConflict()
    times = (*before.repaired, now)[-REPAIRS_AT_ONCE:]
    crowded = len(times) == REPAIRS_AT_ONCE and now - times[0] <= WINDOW_SECONDS
    pause = 0.0
    if before.contested:
        pause = min(LONGEST_PAUSE_SECONDS, 2 * before.pause)
    elif crowded:
        pause = FIRST_PAUSE_SECONDS
    return {**write_conflicts, key: WriteConflict(times, pause, field)}


def current(write_conflicts: WriteConflicts, *, now: float) -> WriteConflicts:
    """Return the conflicts without those that needed no repair for `FORGOTTEN_SECONDS`."""
    return {
        key: conflict
        for key, conflict in write_conflicts.items()
        if now - conflict.repaired[-1] < FORGOTTEN_SECONDS
    }


def newly_contested(before: WriteConflicts, after: WriteConflicts) -> tuple[str, ...]:
    """Return one message per object that is contested in `after` and not in `before`."""
    return tuple(
        f"{kind} {name}: another writer keeps changing {conflict.field.lstrip('.')}; "
        "the operator restores it less and less often"
        for (kind, name), conflict in after.items()
        if conflict.contested and not before.get((kind, name), WriteConflict()).contested
    )
