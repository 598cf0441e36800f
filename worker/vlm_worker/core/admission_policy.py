"""Admission order: priority, age, and the quotas of two lanes. Pure.

One step runs one admission round. Under `dual_queue`, the backlog sets the round's quotas. A lane
is backed up if more than twice its bound wait:

    one lane is backed up      that lane up to its bound, then the other up to half its bound
    both                       the same; the lane goes first that did not go first last time
    neither                    both up to half; the lane goes first that did not go first last time

Under every policy, a sequence that arrived `ageing_seconds` ago is aged. Aged sequences go first,
the oldest before the others, with the top priority of the batch: no sequence starves.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from vlm_worker.core.sequence import Lane, Sequence


class AdmissionPolicy(enum.StrEnum):
    """The order of waiting sequences: by priority and arrival, or by quotas of the two lanes."""

    FCFS = "fcfs"
    DUAL_QUEUE = "dual_queue"


class AdmissionReason(enum.StrEnum):
    """Why a sequence was admitted next.

    ORDER: by priority and arrival (`fcfs`). AGED: it waited for `ageing_seconds`. BACKLOG: its lane
    was backed up. FILLING: the backed-up lane left capacity. BALANCED: no lane was backed up.
    RESERVED: its blocks are reserved, and no sequence before it could be admitted.
    """

    ORDER = "order"
    AGED = "aged"
    BACKLOG = "backlog"
    FILLING = "filling"
    BALANCED = "balanced"
    RESERVED = "reserved"


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How the next sequence is chosen.

    Attributes:
        policy: the order of waiting sequences.
        max_text: sequences of the text lane that one round of `dual_queue` admits.
        max_vision: the same for the vision lane.
        ageing_seconds: a sequence that waited this long goes first.
    """

    policy: AdmissionPolicy = AdmissionPolicy.FCFS
    max_text: int = 32
    max_vision: int = 8
    ageing_seconds: float = 3.0

    def __post_init__(self) -> None:
        """Refuse bounds that would never admit a lane."""
        if self.max_text < 1 or self.max_vision < 1:
            raise ValueError(
                f"max_text ({self.max_text}) and max_vision ({self.max_vision}) must be at least 1"
            )

    def bound(self, lane: Lane) -> int:
        """Sequences of a lane that one round admits."""
        return self.max_vision if lane is Lane.VISION else self.max_text


@dataclasses.dataclass(frozen=True, slots=True)
class LaneQuota:
    """At most `count` sequences of `lane` are admitted in this round."""

    lane: Lane
    count: int
    reason: AdmissionReason


def preemption_order(sequence: Sequence) -> tuple[int, int]:
    """Sort key of running sequences: the largest is preempted first."""
    return -max(sequence.priority, sequence.aged_priority), sequence.arrival


def lane_quotas(
    backlog: Mapping[Lane, int], settings: AdmissionSettings, *, last_first: Lane
) -> tuple[LaneQuota, LaneQuota]:
    """The quotas of one round of `dual_queue`.

    Args:
        backlog: sequences of each lane that could be admitted.
        settings: the bounds.
        last_first: the lane that went first in the last round that admitted a sequence.
    """
    backed_up = [lane for lane, num in backlog.items() if num > 2 * settings.bound(lane)]
    first = backed_up[0] if len(backed_up) == 1 else _other(last_first)
    second = _other(first)
    half = max(settings.bound(second) // 2, 1)
    if backed_up:
        return (
            LaneQuota(first, settings.bound(first), AdmissionReason.BACKLOG),
            LaneQuota(second, half, AdmissionReason.FILLING),
        )
    return (
        LaneQuota(first, max(settings.bound(first) // 2, 1), AdmissionReason.BALANCED),
        LaneQuota(second, half, AdmissionReason.BALANCED),
    )


def _other(lane: Lane) -> Lane:
    return Lane.TEXT if lane is Lane.VISION else Lane.VISION
