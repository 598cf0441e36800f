"""Who of the waiting goes first: priority, age, and the turns of two queues. Pure.

A wave is what one step admits. Under `dual_queue` its turns are, by how many wait (the backlog):

    of one lane more than twice its bound     that lane up to its bound, then the other up to half
    of both                                   likewise, the lane first that was not the last time
    of neither                                both up to half, the lane first that was not last time

Under every policy, whoever arrived `ageing_seconds` ago goes before all who did not, the oldest
first, and is as important then as any that runs: so nobody starves, whatever arrives.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from vlm_worker.core.sequence import Lane, Sequence


class AdmissionPolicy(enum.StrEnum):
    """The order among those who wait: by priority and arrival, or by turns of the two lanes."""

    FCFS = "fcfs"
    DUAL_QUEUE = "dual_queue"


class AdmissionReason(enum.StrEnum):
    """Why a sequence was the next to enter.

    ORDER: by priority and arrival (`fcfs`). AGED: it had waited for so long. BACKLOG: its lane was
    backed up. FILLING: the backed-up lane left room. BALANCED: no lane was backed up. RESERVED: its
    blocks are set aside, and whoever was before it could not enter.
    """

    ORDER = "order"
    AGED = "aged"
    BACKLOG = "backlog"
    FILLING = "filling"
    BALANCED = "balanced"
    RESERVED = "reserved"


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionRules:
    """How the next sequence is chosen.

    Attributes:
        policy: the order among those who wait.
        max_text: sequences of the text lane that one wave of `dual_queue` admits.
        max_vision: likewise of the vision lane.
        ageing_seconds: who arrived so long ago goes first.
    """

    policy: AdmissionPolicy = AdmissionPolicy.FCFS
    max_text: int = 32
    max_vision: int = 8
    ageing_seconds: float = 3.0

    def __post_init__(self) -> None:
        """Refuse bounds under which a lane would never move."""
        if self.max_text < 1 or self.max_vision < 1:
            raise ValueError(
                f"max_text ({self.max_text}) and max_vision ({self.max_vision}) must be at least 1"
            )

    def bound(self, lane: Lane) -> int:
        """Sequences of a lane that one wave admits."""
        return self.max_vision if lane is Lane.VISION else self.max_text

    def is_aged(self, sequence: Sequence, *, now: float) -> bool:
        """Whether it goes before all who are not aged."""
        return now - sequence.arrived_at >= self.ageing_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """`lane` may admit until `room` of its sequences have entered in this wave."""

    lane: Lane
    room: int
    reason: AdmissionReason


def rank(sequence: Sequence) -> tuple[int, int]:
    """The order within a lane: the smaller one goes first."""
    return -sequence.priority, sequence.arrival


def precedence(sequence: Sequence) -> tuple[int, int]:
    """The order among those who run: the larger one is preempted first."""
    return -max(sequence.priority, sequence.raised_priority), sequence.arrival


def turns(
    backlog: Mapping[Lane, int], rules: AdmissionRules, *, last_first: Lane
) -> tuple[Turn, Turn]:
    """The turns of a wave of `dual_queue`.

    Args:
        backlog: sequences of each lane that could enter.
        rules: the bounds.
        last_first: the lane that went first in the last wave that admitted anybody.
    """
    backed_up = [lane for lane, num in backlog.items() if num > 2 * rules.bound(lane)]
    first = backed_up[0] if len(backed_up) == 1 else _other(last_first)
    second = _other(first)
    half = max(rules.bound(second) // 2, 1)
    if backed_up:
        return (
            Turn(first, rules.bound(first), AdmissionReason.BACKLOG),
            Turn(second, half, AdmissionReason.FILLING),
        )
    return (
        Turn(first, max(rules.bound(first) // 2, 1), AdmissionReason.BALANCED),
        Turn(second, half, AdmissionReason.BALANCED),
    )


def _other(lane: Lane) -> Lane:
    return Lane.TEXT if lane is Lane.VISION else Lane.VISION
