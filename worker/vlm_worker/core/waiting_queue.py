"""A queue by priority, turn and arrival, in which an item that has aged goes first. Pure.

    by order     (-priority, start, arrival)    the first one is next
    by turn      (start, arrival)               its first one is next if it has waited
                                                `ageing_seconds`, whatever its priority
    by arrival   arrival                        the oldest one, for statistics

`start` is of `fair_order`: a tenant's flood does not age before the turns of others. Heaps, because
a preempted prompt or a postponed image is pushed again with its old start and arrival. Push,
discard and next are O(log n) amortised, oldest is O(1) amortised.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, Generic, Protocol, TypeVar

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
    def virtual_start(self) -> float: ...


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


class WaitingQueue(Generic[Q]):
    """Items by order and by turn. One that has waited `ageing_seconds` goes before the others."""

    def __init__(self, *, ageing_seconds: float) -> None:
        self._ageing_seconds = ageing_seconds
        self._by_order: LazyHeap[Q] = LazyHeap()
        self._by_turn: LazyHeap[Q] = LazyHeap()
        self._by_arrival: LazyHeap[Q] = LazyHeap()

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, item: Q | None) -> bool:
        return item in self._by_arrival

    @property
    def oldest(self) -> Q | None:
        """The item that arrived first."""
        return self._by_arrival.first

    @property
    def first(self) -> Q | None:
        """The first item by priority, turn and arrival, whatever the age of the others."""
        return self._by_order.first

    def aged(self, *, now: float) -> Q | None:
        """The item whose turn it is if it has aged. `now` is on the clock of `arrived_at`."""
        first = self._by_turn.first
        has_aged = first is not None and now - first.arrived_at >= self._ageing_seconds
        return first if has_aged else None

    def next(self, *, now: float) -> Q | None:
        """The next item: the one whose turn it is if it has aged, else the first by order."""
        return self.aged(now=now) or self._by_order.first

    def push(self, item: Q) -> None:
        """Add an item; one that is pushed again is ordered by its old start and arrival."""
        turn = (item.virtual_start, item.arrival)
        self._by_order.push((-item.priority, *turn), item)
        self._by_turn.push(turn, item)
        self._by_arrival.push(item.arrival, item)

    def discard(self, item: Q) -> bool:
        """Remove an item; False if it is not in the queue."""
        self._by_turn.discard(item)
        self._by_arrival.discard(item)
        return self._by_order.discard(item)
