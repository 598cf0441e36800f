"""Admission order: priority, turns, age, two lanes' quotas, and the queue that follows them. Pure.

    lanes       candidates: one `WaitingQueue` under `fcfs`, text and vision under `dual_queue`
    reserved    candidates of both lanes with reserved blocks, the oldest first
    awaiting    requested embeddings: not examined until one arrives
    blocked     may not request embeddings until more blocks are free

A step opens an `AdmissionRound` over the queue, takes candidates one by one, admits some and closes
it. A candidate that was not admitted keeps its position.

One step runs one admission round. Under `dual_queue`, the backlog sets the round's quotas. A lane
is backed up if more than twice its bound wait:

    one lane is backed up      that lane up to its bound, then the other up to half its bound
    both                       the same; the lane goes first that did not go first last time
    neither                    both up to half; the lane goes first that did not go first last time

Under every policy, a sequence that arrived `ageing_seconds` ago is aged. Aged sequences go first,
the oldest before the others, with the top priority of the batch: no sequence starves. If tenants
take turns (`fair_order`), the sequence whose turn it is goes first once it has aged.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
from collections.abc import Mapping
from typing import Final, Self

from vlm_worker.core.fair_order import FairOrder
from vlm_worker.core.sequence import Lane, Sequence
from vlm_worker.core.waiting_queue import LazyHeap, WaitingQueue
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings

LANES: Final = tuple(Lane)  # iterating over an Enum class is slow

MAX_UNFIT: Final = 2
"""Candidates of one lane that do not fit in one round; then the other lane is next."""

_arrival = operator.attrgetter("arrival")


class AdmissionReason(enum.StrEnum):
    """Why a sequence was admitted next.

    ORDER: by priority, turn and arrival (`fcfs`). AGED: it waited for `ageing_seconds`. BACKLOG:
    its lane was backed up. FILLING: the backed-up lane left capacity. BALANCED: no lane was backed
    up. RESERVED: its blocks are reserved, and no sequence before it could be admitted.
    """

    ORDER = "order"
    AGED = "aged"
    BACKLOG = "backlog"
    FILLING = "filling"
    BALANCED = "balanced"
    RESERVED = "reserved"


@dataclasses.dataclass(frozen=True, slots=True)
class LaneQuota:
    """At most `count` sequences of `lane` are admitted in this round."""

    lane: Lane
    count: int
    reason: AdmissionReason


def preemption_order(sequence: Sequence) -> tuple[int, float, int]:
    """Sort key of running sequences: the largest is preempted first.

    The turn of a tenant goes before arrival: else the older sequences of a flood would preempt the
    one that was admitted before them.
    """
    priority = max(sequence.priority, sequence.aged_priority)
    return -priority, sequence.virtual_start, sequence.arrival


def lane_bound(settings: AdmissionSettings, lane: Lane) -> int:
    """Sequences of a lane that one round of `dual_queue` admits."""
    return settings.max_vision if lane is Lane.VISION else settings.max_text


def lane_quotas(
    backlog: Mapping[Lane, int], settings: AdmissionSettings, *, last_first: Lane
) -> tuple[LaneQuota, LaneQuota]:
    """The quotas of one round of `dual_queue`.

    `backlog` has the sequences of each lane that could be admitted. `last_first` is the lane that
    went first in the last round that admitted a sequence.
    """
    bounds = {lane: lane_bound(settings, lane) for lane in LANES}
    backed_up = [lane for lane, num in backlog.items() if num > 2 * bounds[lane]]
    [first] = backed_up if len(backed_up) == 1 else set(LANES) - {last_first}
    [second] = set(LANES) - {first}
    half = {lane: max(bound // 2, 1) for lane, bound in bounds.items()}
    if backed_up:
        return (
            LaneQuota(first, bounds[first], AdmissionReason.BACKLOG),
            LaneQuota(second, half[second], AdmissionReason.FILLING),
        )
    return (
        LaneQuota(first, half[first], AdmissionReason.BALANCED),
        LaneQuota(second, half[second], AdmissionReason.BALANCED),
    )


class AdmissionQueue:
    """The sequences that wait to be admitted. Only the scheduler writes it.

    `num_changes` counts the sequences that were added, removed, or unblocked.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.num_tokens = 0
        self.num_changes = 0
        self.num_admitted: collections.Counter[AdmissionReason] = collections.Counter()
        self.fair_order = FairOrder()
        self._queues: tuple[WaitingQueue[Sequence], ...] = (self._queue(),)
        if settings.policy is AdmissionPolicy.DUAL_QUEUE:
            self._queues += (self._queue(),)
        self._lanes = {lane: self._queues[i % len(self._queues)] for i, lane in enumerate(LANES)}
        self._reserved: LazyHeap[Sequence] = LazyHeap()
        self._awaiting: LazyHeap[Sequence] = LazyHeap()
        self._blocked = self._queue()
        self._count = dict.fromkeys(LANES, 0)
        self._last_first = Lane.VISION

    def __len__(self) -> int:
        return sum(self._count.values())

    def count(self, lane: Lane) -> int:
        """Waiting sequences of a lane, blocked ones included."""
        return self._count[lane]

    @property
    def oldest(self) -> Sequence | None:
        """The sequence that arrived first."""
        heads = (*(queue.oldest for queue in (*self._queues, self._blocked)), self._awaiting.first)
        return min((s for s in heads if s is not None), key=_arrival, default=None)

    def add(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self._count[sequence.lane] += 1
        self.num_tokens += sequence.num_tokens
        sequence.on_unblock = self._unblocked
        self.fair_order.arrived(sequence.rank.flow)
        self._put(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; not within a round."""
        self._out(sequence)
        self._forget(sequence)
        self.fair_order.left(sequence.rank.flow)

    @property
    def num_blocked(self) -> int:
        return len(self._blocked)

    def next_blocked(self, *, now: float, before: Sequence | None) -> Sequence | None:
        """The next to unblock: `before` if blocked, the oldest if aged, else by order."""
        return before if before in self._blocked else self._blocked.next(now=now)

    def block_on_encoder(self, sequence: Sequence) -> None:
        """Move a blocked sequence to those that may not request embeddings; not within a round."""
        self._out(sequence)
        self._put(sequence)

    # ---- for rounds ------------------------------------------------------------------------------

    def _put(self, sequence: Sequence) -> None:
        if sequence.is_blocked_on_encoder:
            self._blocked.push(sequence)
        elif sequence.is_blocked:
            self._awaiting.push(sequence.arrival, sequence)
        else:
            self._lanes[sequence.lane].push(sequence)
            if sequence.reserved_blocks:
                self._reserved.push(sequence.arrival, sequence)

    def _out(self, sequence: Sequence) -> None:
        self._awaiting.discard(sequence)
        self._blocked.discard(sequence)
        self._reserved.discard(sequence)
        self._lanes[sequence.lane].discard(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self._count[sequence.lane] -= 1
        self.num_tokens -= sequence.num_tokens
        sequence.on_unblock = None

    def _charge(self, sequence: Sequence) -> None:
        """Charge an admitted sequence to its tenant; once, however often it is preempted."""
        if sequence.virtual_start < 0:
            sequence.virtual_start = self.fair_order.admitted(sequence.rank)
        else:
            self.fair_order.left(sequence.rank.flow)

    def _queue(self) -> WaitingQueue[Sequence]:
        return WaitingQueue(self.fair_order, ageing_seconds=self.settings.ageing_seconds)

    def _unblocked(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self._out(sequence)
        self._put(sequence)


class AdmissionRound:
    """One step's admissions. At the context's end, candidates that were not admitted wait again."""

    def __init__(self, waiting: AdmissionQueue, *, now: float) -> None:
        self._waiting = waiting
        self._now = now
        self._admitted = dict.fromkeys(LANES, 0)
        self._seen: list[Sequence] = []
        self._reason = AdmissionReason.ORDER
        self._quotas: tuple[LaneQuota, ...] = ()
        if waiting.settings.policy is AdmissionPolicy.DUAL_QUEUE:
            backlog = {lane: len(queue) for lane, queue in waiting._lanes.items()}
            self._quotas = lane_quotas(backlog, waiting.settings, last_first=waiting._last_first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Put back the candidates that were not admitted."""
        for sequence in self._seen:
            self._waiting._put(sequence)

    def next(self) -> Sequence | None:
        """The next candidate, each once a round; None if no other may be admitted now."""
        choice = self._choose()
        return None if choice is None else self._see(*choice)

    def next_reserved(self) -> Sequence | None:
        """The oldest remaining candidate with reserved blocks, whatever its lane."""
        sequence = self._waiting._reserved.first
        return None if sequence is None else self._see(sequence, AdmissionReason.RESERVED)

    def admit(self, sequence: Sequence) -> AdmissionReason:
        """Admit the last candidate: it leaves the queue; returns why it was chosen."""
        assert self._seen[-1] is sequence
        self._seen.pop()
        self._admitted[sequence.lane] += 1
        self._waiting._forget(sequence)
        self._waiting._charge(sequence)
        self._waiting.num_admitted[self._reason] += 1
        if self._reason in {quota.reason for quota in self._quotas}:
            self._waiting._last_first = self._quotas[0].lane
        return self._reason

    def _see(self, sequence: Sequence, reason: AdmissionReason) -> Sequence:
        self._reason = reason
        self._waiting._out(sequence)
        self._seen.append(sequence)
        return sequence

    def _choose(self) -> tuple[Sequence, AdmissionReason] | None:
        if not self._quotas:
            [queue] = self._waiting._queues
            if (sequence := queue.aged(now=self._now)) is not None:
                return sequence, AdmissionReason.AGED
            return None if queue.first is None else (queue.first, AdmissionReason.ORDER)
        settings, lanes = self._waiting.settings, self._waiting._lanes
        open_lanes = [lane for lane in LANES if self._has_quota(lane, lane_bound(settings, lane))]
        aged = [s for lane in open_lanes if (s := lanes[lane].aged(now=self._now)) is not None]
        if aged:
            return min(aged, key=_arrival), AdmissionReason.AGED
        for quota in self._quotas:
            head = lanes[quota.lane].first
            if head is None or not self._has_quota(quota.lane, quota.count):
                continue
            if self._num_unfit(quota.lane) < MAX_UNFIT:
                return head, quota.reason
        return None

    def _num_unfit(self, lane: Lane) -> int:
        """Candidates of a lane that lack no embedding and were not admitted."""
        return sum(sequence.lane is lane and not sequence.is_blocked for sequence in self._seen)

    def _has_quota(self, lane: Lane, bound: int) -> bool:
        return self._admitted[lane] < bound
