"""Detects other writers of our fields by counting repairs, and delays further repairs. Pure.

another writer changes, we repair ─▶ 5 repairs within a minute ─▶ contested: the next repair waits
                                                                  2, 4, 8 … 300 s; one Event

Repairs before that are not delayed. If a field keeps our value for ten minutes, its count is reset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Key = tuple[str, str]  # kind, name

WINDOW_SECONDS = 60.0
REPAIRS_AT_ONCE = 5
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
FORGOTTEN_SECONDS = 600.0


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


def due(write_conflicts: WriteConflicts, key: Key, *, now: float) -> float:
    """Return the seconds until an object may be repaired; 0 means now."""
    found = write_conflicts.get(key)
    if found is None or not found.contested:
        return 0.0
    return max(0.0, found.repaired[-1] + found.pause - now)


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
        key: found
        for key, found in write_conflicts.items()
        if now - found.repaired[-1] < FORGOTTEN_SECONDS
    }


def newly_contested(before: WriteConflicts, after: WriteConflicts) -> tuple[str, ...]:
    """Return one message per object that is contested in `after` and not in `before`."""
    return tuple(
        f"{kind} {name}: another writer keeps changing {found.field.lstrip('.')}; "
        "the operator restores it less and less often"
        for (kind, name), found in after.items()
        if found.contested and not before.get((kind, name), WriteConflict()).contested
    )
