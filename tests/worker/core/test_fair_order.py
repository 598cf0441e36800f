"""Tenants that wait together get equal shares of weighted work; arrival decides all else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.core.arrivals import text
from worker.core.simulation import Simulation, Work

from vlm_worker.core.admission_policy import AdmissionQueue, AdmissionReason, AdmissionRound
from vlm_worker.core.fair_order import FairOrder, Rank
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.types import Request, RequestKey, SamplingParams

AGEING = 10.0
TENANTS = (b"a", b"b", b"c")


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    rank: Rank
    arrival: int


class Line:
    """Waiting items of one queue without priorities."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.waiting: list[Item] = []
        self.num_arrivals = 0

    def arrive(self, tenant: bytes, seconds: float) -> Item:
        self.num_arrivals += 1
        item = Item(Rank(0, tenant, seconds), self.num_arrivals)
        self.order.arrived(item.rank.flow)
        self.waiting.append(item)
        return item

    def admit(self, item: Item | None = None) -> Item:
        """Admit an item out of turn, or the one whose turn it is."""
        item = item or min(
            self.waiting, key=lambda one: (self.order.start(one.rank.flow), one.arrival)
        )
        self.waiting.remove(item)
        self.order.admitted(item.rank)
        return item

    def cancel(self, item: Item) -> None:
        self.waiting.remove(item)
        self.order.left(item.rank.flow)

    def of(self, tenant: bytes) -> list[Item]:
        return [item for item in self.waiting if item.rank.tenant == tenant]


seconds_of_items = st.lists(st.floats(0.01, 100.0), min_size=30, max_size=60)


@given(seconds_of_items, seconds_of_items, st.integers(1, 20), st.integers(0, 10))
def test_while_two_flows_wait_they_differ_by_one_item_of_each(
    first: list[float], second: list[float], ahead: int, cancelled: int
) -> None:
    """Whatever `a` was given before `b` came, and whatever leaves."""
    line = Line()
    for seconds in first:
        line.arrive(b"a", seconds)
    for _ in range(ahead):
        line.admit()
    for seconds in second:
        line.arrive(b"b", seconds)
    for item in (*line.of(b"a")[:cancelled], *line.of(b"b")[:cancelled]):
        line.cancel(item)
    got = {b"a": 0.0, b"b": 0.0}
    bound = max(first) + max(second)
    while line.of(b"a") and line.of(b"b"):
        item = line.admit()
        got[item.rank.tenant] += item.rank.weighted_seconds
        assert abs(got[b"a"] - got[b"b"]) <= bound * (1 + 1e-9)


moves = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "admit", "out of turn", "cancel"]),
        st.sampled_from(TENANTS),
        st.sampled_from([0.0, 0.5, 3.0]),
    ),
    max_size=120,
)


@given(moves)
def test_the_virtual_time_is_the_least_start_and_never_falls(
    done: Items[tuple[str, bytes, float]],
) -> None:
    line = Line()
    before = 0.0
    for number, (move, tenant, seconds) in enumerate(done):
        chosen = line.waiting[number % len(line.waiting)] if line.waiting else None
        if move == "arrive":
            line.arrive(tenant, seconds)
        elif chosen is None:
            continue
        elif move == "cancel":
            line.cancel(chosen)
        else:
            line.admit(chosen if move == "out of turn" else None)
        order = line.order
        starts = [order.start(item.rank.flow) for item in line.waiting]
        assert before <= order.virtual_time <= min(starts, default=order.virtual_time)
        assert set(order._num_waiting) == {item.rank.flow for item in line.waiting}
        assert all(start >= order.virtual_time for start in order._starts.values())
        before = order.virtual_time


@given(st.lists(st.sampled_from([True, True, False]), max_size=80))
def test_without_weighted_seconds_the_order_is_that_of_arrival(arrives: list[bool]) -> None:
    line = Line()
    for number, one in enumerate(arrives):
        if one:
            line.arrive(TENANTS[number % 3], 0.0)
        elif line.waiting:
            assert line.admit().arrival < min((i.arrival for i in line.waiting), default=10**9)
    assert line.order.virtual_time == 0


def test_a_flow_that_was_idle_has_no_credit() -> None:
    line = Line()
    for _ in range(20):
        line.arrive(b"a", 1.0)
    for _ in range(10):
        line.admit()
    for _ in range(3):
        line.arrive(b"b", 1.0)
    assert [line.admit().rank.tenant for _ in range(6)].count(b"b") == 3


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_flow_owes_nothing_for_what_was_cancelled(newest_first: bool) -> None:
    line = Line()
    for _ in range(3):
        line.arrive(b"b", 1.0)
    for item in [line.arrive(b"a", 1.0) for _ in range(200)][:: -1 if newest_first else 1]:
        line.cancel(item)
    last = line.arrive(b"a", 1.0)
    assert last in [line.admit() for _ in range(2)]


def test_a_newcomer_does_not_wait_behind_what_was_admitted_out_of_turn() -> None:
    """As a text request that goes before 200 images of its tenant, which wait for embeddings."""
    line = Line()
    for _ in range(200):
        line.arrive(b"a", 1.0)
    line.admit(line.arrive(b"a", 500.0))
    new = line.arrive(b"b", 1.0)
    assert new in [line.admit() for _ in range(2)]


def test_items_without_weights_do_not_starve_those_with_weights() -> None:
    """The weights of a service change, or gateways know different ones."""
    line = Line()
    for _ in range(10):
        line.arrive(b"w", 2.0)
    admitted = []
    for _ in range(40):
        line.arrive(b"x", 0.0)
        admitted.append(line.admit().rank.tenant)
    assert admitted.count(b"w") == 10


# ---- the queue of sequences ---------------------------------------------------------------------


def waiting_sequence(
    arrival: int,
    tenant: bytes,
    *,
    seconds: float = 1.0,
    priority: int = 0,
    now: float = 0.0,
    lane: Lane = Lane.TEXT,
) -> Sequence:
    request = Request(
        RequestKey(str(arrival), 0), (), 1, SamplingParams(1), cache_salt=tenant, priority=priority,
        weighted_seconds=seconds,
    )  # fmt: skip
    tokens, positions = np.zeros(4, np.int32), np.zeros((1, 1), np.int64)
    return Sequence(request, arrival, tokens, positions, 0, arrived_at=now, lane=lane)


def admit_one(queue: AdmissionQueue, *, now: float) -> tuple[Sequence, AdmissionReason]:
    with AdmissionRound(queue, now=now) as admission_round:
        sequence = admission_round.next()
        assert sequence is not None
        return sequence, admission_round.admit(sequence)


@pytest.mark.parametrize("policy", AdmissionPolicy)
@pytest.mark.parametrize("waited", [0.0, 2 * AGEING])
@pytest.mark.parametrize("lane", Lane)
def test_a_flood_does_not_go_before_another_tenant_whatever_its_age(
    policy: AdmissionPolicy, waited: float, lane: Lane
) -> None:
    queue = AdmissionQueue(AdmissionSettings(policy, ageing_seconds=AGEING))
    for number in range(100):
        queue.add(waiting_sequence(number, b"flood", lane=lane))
    for _ in range(3):
        admit_one(queue, now=waited)
    late = waiting_sequence(100, b"other", now=waited, lane=lane)
    queue.add(late)
    assert late in [admit_one(queue, now=waited)[0] for _ in range(2)]
    assert queue.oldest is not None
    assert queue.oldest.request.cache_salt == b"flood"


def test_a_low_priority_ages_in_its_turn() -> None:
    queue = AdmissionQueue(AdmissionSettings(ageing_seconds=AGEING))
    low = waiting_sequence(0, b"a", priority=-5)
    queue.add(low)
    for number in range(1, 30):
        queue.add(waiting_sequence(number, b"b", priority=5))
    assert admit_one(queue, now=AGEING - 1)[0] is not low
    assert admit_one(queue, now=AGEING) == (low, AdmissionReason.AGED)


def test_a_preempted_sequence_keeps_its_turn_and_is_charged_once() -> None:
    queue = AdmissionQueue(AdmissionSettings(ageing_seconds=AGEING))
    of_a = [waiting_sequence(number, b"a", seconds=5.0) for number in range(2)]
    of_b = [waiting_sequence(number, b"b") for number in range(2, 9)]
    for sequence in (*of_a, *of_b):
        queue.add(sequence)
    assert admit_one(queue, now=0.0)[0] is of_a[0]
    queue.add(of_a[0])
    order = [admit_one(queue, now=0.0)[0] for _ in range(9)]
    assert order[:7] == [of_a[0], *of_b[:5], of_a[1]]


def of_tenant(name: str, tenant: bytes) -> Work:
    work = text(name, 8, max_tokens=40)
    request = dataclasses.replace(work.request, cache_salt=tenant, weighted_seconds=1.0)
    return dataclasses.replace(work, request=request)


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(40, 8), (24, 6)])
def test_the_older_sequences_of_a_flood_do_not_preempt_one_that_was_admitted_before_them(
    num_blocks: int, num_rows: int
) -> None:
    simulation = Simulation(num_blocks=num_blocks, max_num_seqs=num_rows, budget=64)
    for number in range(120):
        simulation.add(of_tenant(f"flood {number}", b"flood"))
    for _ in range(3):
        simulation.step()
    one = simulation.add(of_tenant("one", b"other"))
    num_preemptions = 0
    while one.status is not Status.FINISHED:
        had_row = one.row is not None
        simulation.step()
        num_preemptions += had_row and one.status is Status.WAITING
    assert num_preemptions <= 5
    assert len(simulation.reasons) <= 20
