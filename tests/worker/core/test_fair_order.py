"""Tenants that wait together get equal shares of weighted work; arrival decides all else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.admission_policy import AdmissionQueue, AdmissionReason, AdmissionRound
from vlm_worker.core.fair_order import MAX_IDLE_FLOWS, FairOrder
from vlm_worker.core.sequence import Sequence
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.types import Request, RequestKey, SamplingParams

AGEING = 10.0
FLOWS = (b"a", b"b", b"c")


@dataclasses.dataclass(frozen=True)
class Item:
    flow: bytes
    seconds: float
    start: float
    arrival: int


class Line:
    """Waiting items of one queue without priorities."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.waiting: list[Item] = []
        self.num_arrivals = 0

    def arrive(self, flow: bytes, seconds: float) -> Item:
        self.num_arrivals += 1
        start = self.order.start(flow, seconds)
        self.waiting.append(Item(flow, seconds, start, self.num_arrivals))
        return self.waiting[-1]

    def admit(self) -> Item:
        item = min(self.waiting, key=lambda item: (item.start, item.arrival))
        self._leave(item)
        return item

    def cancel(self, item: Item) -> None:
        self.order.cancelled(item.flow, item.seconds, start=item.start)
        self.waiting.remove(item)

    def _leave(self, item: Item) -> None:
        self.waiting.remove(item)
        self.order.admitted(item.start)
        if not self.waiting:
            self.order.emptied()


seconds_of_items = st.lists(st.floats(0.01, 100.0), min_size=30, max_size=60)


@given(seconds_of_items, seconds_of_items, st.integers(1, 20), st.integers(0, 10))
def test_while_two_flows_wait_they_differ_by_one_item_of_each(
    first: list[float], second: list[float], ahead: int, cancelled: int
) -> None:
    """Whatever `a` was given before `b` came, and whoever cancels."""
    line = Line()
    for seconds in first:
        line.arrive(b"a", seconds)
    for _ in range(ahead):
        line.admit()
    for seconds in second:
        line.arrive(b"b", seconds)
    for item in line.waiting[-1 : -1 - cancelled : -1]:
        line.cancel(item)
    got = {b"a": 0.0, b"b": 0.0}
    bound = max(first) + max(second)
    while {item.flow for item in line.waiting} == {b"a", b"b"}:
        item = line.admit()
        got[item.flow] += item.seconds
        assert abs(got[b"a"] - got[b"b"]) <= bound * (1 + 1e-9)


moves = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "admit", "cancel"]),
        st.sampled_from(FLOWS),
        st.sampled_from([0.0, 0.5, 3.0]),
    ),
    max_size=120,
)


@given(moves)
def test_no_item_passes_an_earlier_one_of_its_flow(
    done: Items[tuple[str, bytes, float]],
) -> None:
    line = Line()
    for move, flow, seconds in done:
        if move == "arrive":
            line.arrive(flow, seconds or 1.0)
        elif move == "cancel" and line.waiting:
            line.cancel(line.waiting[int(seconds * 7) % len(line.waiting)])
        elif move == "admit" and line.waiting:
            item = line.admit()
            assert not any(
                other.flow == item.flow and other.arrival < item.arrival for other in line.waiting
            )


@given(st.lists(st.sampled_from([True, True, False]), max_size=80))
def test_without_weighted_seconds_the_order_is_that_of_arrival(arrives: list[bool]) -> None:
    line = Line()
    for number, one in enumerate(arrives):
        if one:
            line.arrive(FLOWS[number % 3], 0.0)
        elif line.waiting:
            assert line.admit().arrival < min((i.arrival for i in line.waiting), default=10**9)


def test_a_flow_that_was_idle_has_no_credit() -> None:
    line = Line()
    for _ in range(20):
        line.arrive(b"a", 1.0)
    for _ in range(10):
        line.admit()
    line.arrive(b"b", 1.0)
    line.arrive(b"b", 1.0)
    line.arrive(b"b", 1.0)
    assert [line.admit().flow for _ in range(6)].count(b"b") == 3


def test_flows_of_the_past_are_forgotten() -> None:
    order = FairOrder()
    for number in range(5 * MAX_IDLE_FLOWS):
        order.admitted(order.start(number.to_bytes(4), 1.0) + 1.0)
    assert len(order._finish) <= MAX_IDLE_FLOWS + 1
    order.emptied()
    assert not order._finish


# ---- the queue of sequences ---------------------------------------------------------------------


def waiting_sequence(
    arrival: int, flow: bytes, *, seconds: float = 1.0, priority: int = 0, now: float = 0.0
) -> Sequence:
    request = Request(
        RequestKey(str(arrival), 0), (), 1, SamplingParams(1), cache_salt=flow, priority=priority,
        weighted_seconds=seconds,
    )  # fmt: skip
    return Sequence(
        request, arrival, np.zeros(4, np.int32), np.zeros((1, 1), np.int64), 0, arrived_at=now
    )


def admit_one(queue: AdmissionQueue, *, now: float) -> tuple[Sequence, AdmissionReason]:
    with AdmissionRound(queue, now=now) as admission_round:
        sequence = admission_round.next()
        assert sequence is not None
        return sequence, admission_round.admit(sequence)


@pytest.mark.parametrize("policy", AdmissionPolicy)
@pytest.mark.parametrize("waited", [0.0, 2 * AGEING])
def test_a_flood_does_not_go_before_another_tenant_whatever_its_age(
    policy: AdmissionPolicy, waited: float
) -> None:
    queue = AdmissionQueue(AdmissionSettings(policy, ageing_seconds=AGEING))
    for number in range(100):
        queue.add(waiting_sequence(number, b"flood"))
    for _ in range(3):
        admit_one(queue, now=waited)
    late = waiting_sequence(100, b"other", now=waited)
    queue.add(late)
    admitted = [admit_one(queue, now=waited)[0] for _ in range(2)]
    assert late in admitted
    assert queue.oldest is not None
    assert queue.oldest.request.cache_salt == b"flood"


def test_a_low_priority_ages_in_its_turn() -> None:
    """Its tenant's share stays its own: others of higher priority wait behind it once it aged."""
    queue = AdmissionQueue(AdmissionSettings(ageing_seconds=AGEING))
    low = waiting_sequence(0, b"a", priority=-5)
    queue.add(low)
    for number in range(1, 30):
        queue.add(waiting_sequence(number, b"b", priority=5))
    assert admit_one(queue, now=AGEING - 1)[0] is not low
    assert admit_one(queue, now=AGEING) == (low, AdmissionReason.AGED)


def test_a_preempted_sequence_keeps_its_turn() -> None:
    queue = AdmissionQueue(AdmissionSettings(ageing_seconds=AGEING))
    sequences = [waiting_sequence(number, b"a") for number in range(4)]
    for sequence in sequences:
        queue.add(sequence)
    first, _ = admit_one(queue, now=0.0)
    second, _ = admit_one(queue, now=0.0)
    queue.add(second)
    queue.add(first)
    assert [admit_one(queue, now=0.0)[0] for _ in range(4)] == sequences
