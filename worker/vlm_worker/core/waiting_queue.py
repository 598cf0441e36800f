"""A queue by priority, turn and arrival, in which an item that has aged goes first. Pure.

    by order     (-priority, start, arrival)    the first one is next
    by turn      (start, arrival)               its first one is next if it has waited
                                                `ageing_seconds`, whatever its priority

`start` is that of the item's flow (`fair_order`), which changes while it waits: so each flow has a
line of its own, by order and by arrival, and the queue compares the heads of lines. An item that
was admitted before has the start of then, and so keeps its turn. A tenant's flood does not age
before the turns of others. Lines are heaps, because a preempted prompt or a postponed image is
pushed again with its old arrival. Push, discard and next are O(log n + flows) amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from vlm_worker.core.fair_order import FairOrder, Rank

MIN_SWEEP: Final = 64
"""A heap with fewer removed entries is not swept."""


class Queued(Protocol):
    """An item of a `WaitingQueue`. Hashable by identity; its values must not change while it waits.

    Of two items, the one with the smaller `arrival` must not have the later `arrived_at` (seconds).
    """

    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def virtual_start(self) -> float: ...  # when it was admitted before; negative: never
    @property
    def rank(self) -> Rank: ...


T = TypeVar("T")
Q = TypeVar("Q", bound=Queued)


class LazyHeap(Generic[T]):
    """Items by key, the smallest first. Removed items are marked and swept in bulk."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: T | None) -> bool:
        return item in self._tickets

    @property
    def first(self) -> T | None:
        """The item with the smallest key."""
        while self._entries and not self._is_live(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def push(self, key: Any, item: T) -> None:
        self._next_ticket += 1
        self._tickets[item] = self._next_ticket
        heapq.heappush(self._entries, (key, self._next_ticket, item))

    def discard(self, item: T) -> bool:
        """Remove an item; False if it is not in the heap."""
        if self._tickets.pop(item, None) is None:
            return False
        num_removed = len(self._entries) - len(self._tickets)
        if num_removed > max(len(self._tickets), MIN_SWEEP):
            self._entries = [entry for entry in self._entries if self._is_live(entry)]
            heapq.heapify(self._entries)
        return True

    def _is_live(self, entry: tuple[Any, int, T]) -> bool:
        return self._tickets.get(entry[2]) == entry[1]


class _Line(Generic[Q]):
    """The items of one flow."""

    def __init__(self) -> None:
        self.by_order: LazyHeap[Q] = LazyHeap()
        self.by_arrival: LazyHeap[Q] = LazyHeap()


class WaitingQueue(Generic[Q]):
    """Items by order and by turn. One that has waited `ageing_seconds` goes before the others.

    Its owner counts the items that wait in `fair_order`, which queues may share.
    """

    def __init__(self, fair_order: FairOrder, *, ageing_seconds: float) -> None:
        self._fair_order = fair_order
        self._ageing_seconds = ageing_seconds
        self._lines: dict[bytes, _Line[Q]] = {}

    def __len__(self) -> int:
        return sum(len(line.by_arrival) for line in self._lines.values())

    def __contains__(self, item: Q | None) -> bool:
        if item is None:
            return False
        line = self._lines.get(item.rank.flow)
        return line is not None and item in line.by_arrival

    @property
    def oldest(self) -> Q | None:
        """The item that arrived first."""
        return self._least(lambda line: line.by_arrival.first, lambda item: item.arrival)

    @property
    def first(self) -> Q | None:
        """The first item by priority, turn and arrival, whatever the age of the others."""
        return self._least(
            lambda line: line.by_order.first,
            lambda item: (-item.priority, self._start(item), item.arrival),
        )

    def aged(self, *, now: float) -> Q | None:
        """The oldest item of the flow whose turn it is if it has aged.

        `now` is on the clock of `arrived_at`.
        """
        first = self._least(
            lambda line: line.by_arrival.first, lambda item: (self._start(item), item.arrival)
        )
        has_aged = first is not None and now - first.arrived_at >= self._ageing_seconds
        return first if has_aged else None

    def next(self, *, now: float) -> Q | None:
        """The next item: the one whose turn it is if it has aged, else the first by order."""
        return self.aged(now=now) or self.first

    def push(self, item: Q) -> None:
        """Add an item; one that is pushed again is ordered by its old arrival."""
        line = self._lines.setdefault(item.rank.flow, _Line())
        line.by_order.push((-item.priority, item.arrival), item)
        line.by_arrival.push(item.arrival, item)

    def discard(self, item: Q) -> bool:
        """Remove an item; False if it is not in the queue."""
        line = self._lines.get(item.rank.flow)
        if line is None or not line.by_order.discard(item):
            return False
        line.by_arrival.discard(item)
        if not len(line.by_arrival):
            del self._lines[item.rank.flow]
        return True

    def _start(self, item: Q) -> float:
        if item.virtual_start >= 0:
            return item.virtual_start
        return self._fair_order.start(item.rank.flow)

    def _least(self, head: Callable[[_Line[Q]], Q | None], key: Callable[[Q], Any]) -> Q | None:
        """Of the heads of all lines, the one with the least key."""
        heads = [item for line in self._lines.values() if (item := head(line)) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=key)
