"""Who else writes what we write? Pure: repairs are counted, and a fight is left for a while.

another edits, we repair ─▶ again and again within a minute ─▶ contested: the next repair waits
                                                               2, 4, 8 … 300 s; one Event says so

One repair is at once, as are the first few. A field that stays as we left it for ten minutes is
nobody else's any more.
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
class Contest:
    """What was repaired on one object.

    Attributes:
        repaired: when, the latest last, in seconds since the epoch; at most `REPAIRS_AT_ONCE`.
        pause: how long the next repair waits after the last; 0 while nobody fights.
        field: what was last found changed.
    """

    repaired: tuple[float, ...] = ()
    pause: float = 0.0
    field: str = ""

    @property
    def fought(self) -> bool:
        """Whether somebody else keeps writing."""
        return self.pause > 0


Contests = Mapping[Key, Contest]


def due(contests: Contests, key: Key, *, now: float) -> float:
    """Return the seconds until an object may be repaired; 0 for now."""
    found = contests.get(key)
    if found is None or not found.fought:
        return 0.0
    return max(0.0, found.repaired[-1] + found.pause - now)


def repaired(contests: Contests, key: Key, field: str, *, now: float) -> Contests:
    """Count a repair of `field`; as many as `REPAIRS_AT_ONCE` within the window are a fight."""
    before = contests.get(key, Contest())
    if before.repaired and now - before.repaired[-1] >= FORGOTTEN_SECONDS:
        before = Contest()
    times = (*before.repaired, now)[-REPAIRS_AT_ONCE:]
    crowded = len(times) == REPAIRS_AT_ONCE and now - times[0] <= WINDOW_SECONDS
    pause = 0.0
    if before.fought:
        pause = min(LONGEST_PAUSE_SECONDS, 2 * before.pause)
    elif crowded:
        pause = FIRST_PAUSE_SECONDS
    return {**contests, key: Contest(times, pause, field)}


def current(contests: Contests, *, now: float) -> Contests:
    """Forget what was left alone for long enough."""
    return {
        key: found
        for key, found in contests.items()
        if now - found.repaired[-1] < FORGOTTEN_SECONDS
    }


def contested(before: Contests, after: Contests) -> tuple[str, ...]:
    """Say, once each, which fights began between two moments."""
    return tuple(
        f"{kind} {name}: somebody else keeps changing {found.field.lstrip('.')}; it is put back "
        "ever more rarely"
        for (kind, name), found in after.items()
        if found.fought and not before.get((kind, name), Contest()).fought
    )
