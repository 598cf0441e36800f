"""The waiting queue against a model: a list that is sorted on each question."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.fair_order import FIRST_COME, FairOrder, Rank
from vlm_worker.core.waiting_queue import LazyHeap, WaitingQueue

AGEING = 3.0


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    priority: int
    arrival: int
    arrived_at: float
    rank: Rank = FIRST_COME
    virtual_start: float = -1.0


moves = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2)),
        st.tuples(st.just("push"), st.integers(-2, 2)),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.just("discard"), st.integers(0, 40)),
        st.tuples(st.just("return"), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.integers(1, 2)),
    ),
    max_size=80,
)


@given(moves)
def test_it_orders_as_a_sorted_list(done: list[tuple[str, int]]) -> None:
    order = FairOrder()
    queue: WaitingQueue[Item] = WaitingQueue(order, ageing_seconds=AGEING)
    waiting: list[Item] = []
    removed: list[Item] = []
    now = 0.0
    for number, (move, value) in enumerate(done):
        if move == "push":
            rank = Rank(value, b"%d" % (number % 3), 1.0 + number % 2)
            waiting.append(Item(value, number, now, rank, -1.0 if number % 5 else 0.5))
            order.arrived(rank.flow)
            queue.push(waiting[-1])
        elif move == "wait":
            now += value
        elif move == "return" and removed:
            waiting.append(removed.pop(value % len(removed)))
            order.arrived(waiting[-1].rank.flow)
            queue.push(waiting[-1])
        elif move == "discard" and waiting:
            removed.append(waiting.pop(value % len(waiting)))
            order.left(removed[-1].rank.flow)
            assert queue.discard(removed[-1])
            assert not queue.discard(removed[-1])
        elif move == "take" and waiting:
            item = queue.next(now=now)
            assert item is not None
            assert queue.discard(item)
            order.admitted(item.rank)
            waiting.remove(item)
            removed.append(item)
        oldest = min(waiting, key=lambda item: item.arrival, default=None)
        oldest_of = {item.rank.flow: item for item in sorted(waiting, key=lambda i: -i.arrival)}
        first_of = {
            item.rank.flow: item for item in sorted(waiting, key=lambda i: (i.priority, -i.arrival))
        }
        starts = {
            item: item.virtual_start if item.virtual_start >= 0 else order.start(item.rank.flow)
            for item in waiting
        }
        turn = min(oldest_of.values(), key=lambda i: (starts[i], i.arrival), default=None)
        first = min(
            first_of.values(), key=lambda i: (-i.priority, starts[i], i.arrival), default=None
        )
        aged = turn if turn is not None and now - turn.arrived_at >= AGEING else None
        assert len(queue) == len(waiting)
        assert queue.oldest is oldest
        assert queue.first is first
        assert queue.aged(now=now) is aged
        assert queue.next(now=now) is (aged or first)
        assert all(item in queue for item in waiting)
        assert not any(item in queue for item in removed)


def test_removed_items_are_swept() -> None:
    heap: LazyHeap[Item] = LazyHeap()
    stays = Item(0, 0, 0.0)
    heap.push(0, stays)
    for number in range(1, 20_000):
        item = Item(0, number, 0.0)
        heap.push(number, item)
        heap.discard(item)
        assert len(heap._entries) < 100
    assert len(heap) == 1
    assert heap.first is stays
