"""A pool that goes up and down too often waits longer before it shrinks, for a while."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from vlm_operator.autoscale.settling.paced import Change, PoolPace
from vlm_operator.autoscale.tuning import Tuning


def damp(pace: PoolPace, tuning: Tuning, *, window: float, now: float) -> PoolPace:
    """Double the window after too many changes of direction, halve it after quiet.

    Changes count from the last doubling on; the window grows to `max_down_seconds` at most.
    """
    since = max(pace.damped_at, now - tuning.flap_seconds)
    recent = [change for change in pace.changes if change.at > since]
    if turns(recent) >= tuning.flap_changes and window * pace.damping < tuning.max_down_seconds:
        return dataclasses.replace(pace, damping=2 * pace.damping, damped_at=now)
    quiet = 2 * max(tuning.flap_seconds, window * pace.damping)
    if pace.damping > 1 and now - pace.damped_at >= quiet and turns(recent) == 0:
        return dataclasses.replace(pace, damping=pace.damping / 2, damped_at=now)
    return pace


def turns(changes: list[Change]) -> int:
    """Changes of direction."""
    return sum(first.up is not second.up for first, second in pairwise(changes))
