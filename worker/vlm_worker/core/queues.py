"""Who waits, and who of them is next, in O(log n) amortised however many wait. Pure.

                 by rank      by age          rank: priority, then arrival
    text lane    heap         heap            age: arrival alone
    vision lane  heap         heap
    reserved                  heap            those of both lanes who have blocks set aside
    stalled                   heap            nobody looks at them until their pictures come
    asleep       heap         heap            nor at these, until there is room to ask for theirs

A step opens a `Wave` over the queue, takes candidates out one by one, admits some and closes it:
whoever was not admitted is where it was.
"""

from __future__ import annotations

import collections
import heapq
from typing import Any, Final, Generic, Self, TypeVar

from vlm_worker.core.sequence import Lane, Sequence
from vlm_worker.core.waves import (
    AdmissionPolicy,
    AdmissionReason,
    AdmissionRules,
    Turn,
    rank,
    turns,
)

MIN_SWEEP: Final = 64
"""A heap with fewer entries of those who left is not worth sweeping."""

MAX_UNFIT: Final = 2
"""So many of one lane that do not fit are looked at in a wave; then it is the other's turn."""


LANES: Final = tuple(Lane)  # a class of an Enum is slow to walk through

T = TypeVar("T")


class Heap(Generic[T]):
    """Things by key, the smallest first. Who leaves is marked; the marked are swept in bulk."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        """How many are in it."""
        return len(self._tickets)

    def __contains__(self, one: T | None) -> bool:
        """Whether it is in it."""
        return one in self._tickets

    @property
    def first(self) -> T | None:
        """The one with the smallest key."""
        while self._entries and not self._is_live(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def push(self, key: Any, one: T) -> None:
        """Put one in."""
        self._next_ticket += 1
        self._tickets[one] = self._next_ticket
        heapq.heappush(self._entries, (key, self._next_ticket, one))

    def discard(self, one: T) -> None:
        """Take one out, if it is in it."""
        if self._tickets.pop(one, None) is None:
            return
        num_left = len(self._entries) - len(self._tickets)
        if num_left > max(len(self._tickets), MIN_SWEEP):
            self._entries = [entry for entry in self._entries if self._is_live(entry)]
            heapq.heapify(self._entries)

    def _is_live(self, entry: tuple[Any, int, T]) -> bool:
        return self._tickets.get(entry[2]) == entry[1]


class Waiting:
    """The sequences that wait to be admitted. Written by the scheduler alone.

    Of two sequences, the one with the smaller `arrival` must not have the later `arrived_at`.

    Attributes:
        rules: the order.
        num_tokens: tokens of all of them.
        num_changes: how often one came, left, or was woken.
        num_admitted: by reason, how many have left through a wave.
    """

    def __init__(self, rules: AdmissionRules) -> None:
        self.rules = rules
        self.num_tokens = 0
        self.num_changes = 0
        self.num_admitted: collections.Counter[AdmissionReason] = collections.Counter()
        self._ranked: dict[Lane, Heap[Sequence]] = {lane: Heap() for lane in LANES}
        self._aging: dict[Lane, Heap[Sequence]] = {lane: Heap() for lane in LANES}
        self._reserved: Heap[Sequence] = Heap()
        self._stalled: Heap[Sequence] = Heap()
        self._asleep_ranked: Heap[Sequence] = Heap()
        self._asleep_aging: Heap[Sequence] = Heap()
        self._count = dict.fromkeys(LANES, 0)
        self._last_first = Lane.VISION

    def __len__(self) -> int:
        """How many wait."""
        return sum(self._count.values())

    def count(self, lane: Lane) -> int:
        """How many wait in a lane, the stalled ones included."""
        return self._count[lane]

    @property
    def oldest(self) -> Sequence | None:
        """Who came first."""
        heaps = (*self._aging.values(), self._stalled, self._asleep_aging)
        heads = [heap.first for heap in heaps]
        return min((s for s in heads if s is not None), key=_arrival, default=None)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait in its lane."""
        self.num_changes += 1
        self._count[sequence.lane] += 1
        self.num_tokens += sequence.num_tokens
        sequence.on_wake = self._woken
        self._put(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no more; between waves."""
        self._out(sequence)
        self._forget(sequence)

    @property
    def num_asleep(self) -> int:
        """How many wait to be allowed to ask for pictures."""
        return len(self._asleep_aging)

    def first_asleep(self, *, now: float, before: Sequence | None) -> Sequence | None:
        """Who is to be woken first: `before` if it sleeps, the oldest if it is aged, or by rank."""
        oldest = self._asleep_aging.first
        if before in self._asleep_aging:
            return before
        if oldest is not None and self.rules.is_aged(oldest, now=now):
            return oldest
        return self._asleep_ranked.first

    def put_to_sleep(self, sequence: Sequence) -> None:
        """One that is stalled may ask for nothing any more; between waves."""
        self._out(sequence)
        self._put(sequence)

    def wave(self, *, now: float) -> Wave:
        """Begin to admit."""
        return Wave(self, now=now)

    # ---- for waves -------------------------------------------------------------------------------

    def _put(self, sequence: Sequence) -> None:
        if sequence.asleep:
            self._asleep_ranked.push(rank(sequence), sequence)
            self._asleep_aging.push(sequence.arrival, sequence)
        elif sequence.stalled:
            self._stalled.push(sequence.arrival, sequence)
        else:
            self._ranked[sequence.lane].push(rank(sequence), sequence)
            self._aging[sequence.lane].push(sequence.arrival, sequence)
            if sequence.promised:
                self._reserved.push(sequence.arrival, sequence)

    def _out(self, sequence: Sequence) -> None:
        self._stalled.discard(sequence)
        self._asleep_ranked.discard(sequence)
        self._asleep_aging.discard(sequence)
        self._reserved.discard(sequence)
        self._ranked[sequence.lane].discard(sequence)
        self._aging[sequence.lane].discard(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self._count[sequence.lane] -= 1
        self.num_tokens -= sequence.num_tokens
        sequence.on_wake = None

    def _woken(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self._out(sequence)
        self._put(sequence)


class Wave:
    """What one step admits. A context: at its end, whoever was not admitted waits as before."""

    def __init__(self, waiting: Waiting, *, now: float) -> None:
        self._waiting = waiting
        self._now = now
        self._entered = dict.fromkeys(LANES, 0)
        self._seen: list[Sequence] = []
        self._reason = AdmissionReason.ORDER
        self._turns: tuple[Turn, ...] = ()
        if waiting.rules.policy is AdmissionPolicy.DUAL_QUEUE:
            backlog = {lane: len(heap) for lane, heap in waiting._ranked.items()}
            self._turns = turns(backlog, waiting.rules, last_first=waiting._last_first)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Put back whoever was seen and not admitted."""
        for sequence in self._seen:
            self._waiting._put(sequence)

    def next(self) -> Sequence | None:
        """The next candidate; each comes once in a wave. None: nobody else may enter now."""
        choice = self._choose()
        return None if choice is None else self._see(*choice)

    def next_reserved(self) -> Sequence | None:
        """The oldest candidate left that has blocks set aside, whosever turn it is."""
        sequence = self._waiting._reserved.first
        return None if sequence is None else self._see(sequence, AdmissionReason.RESERVED)

    def admit(self, sequence: Sequence) -> AdmissionReason:
        """Let the candidate that came last leave the queue; returns why it was its turn."""
        assert self._seen[-1] is sequence
        self._seen.pop()
        self._entered[sequence.lane] += 1
        self._waiting._forget(sequence)
        self._waiting.num_admitted[self._reason] += 1
        if self._reason in {turn.reason for turn in self._turns}:
            self._waiting._last_first = self._turns[0].lane
        return self._reason

    def _see(self, sequence: Sequence, reason: AdmissionReason) -> Sequence:
        self._reason = reason
        self._waiting._out(sequence)
        self._seen.append(sequence)
        return sequence

    def _choose(self) -> tuple[Sequence, AdmissionReason] | None:
        rules, waiting = self._waiting.rules, self._waiting
        oldest = None
        for lane, heap in waiting._aging.items():
            head = heap.first
            if head is None or (self._turns and not self._room(lane, rules.bound(lane))):
                continue
            if oldest is None or head.arrival < oldest.arrival:
                oldest = head
        if oldest is not None and rules.is_aged(oldest, now=self._now):
            return oldest, AdmissionReason.AGED
        if not self._turns:
            heads = [first for heap in waiting._ranked.values() if (first := heap.first)]
            return (min(heads, key=rank), AdmissionReason.ORDER) if heads else None
        for turn in self._turns:
            head = waiting._ranked[turn.lane].first
            if head is None or not self._room(turn.lane, turn.room):
                continue
            if self._num_unfit(turn.lane) < MAX_UNFIT:
                return head, turn.reason
        return None

    def _num_unfit(self, lane: Lane) -> int:
        """Sequences of a lane that were seen, lack no embedding, and did not enter all the same."""
        return sum(sequence.lane is lane and not sequence.stalled for sequence in self._seen)

    def _room(self, lane: Lane, bound: int) -> bool:
        return self._entered[lane] < bound


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
