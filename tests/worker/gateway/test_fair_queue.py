"""Deficit round robin: a tenant's flood delays others by one quantum, and nobody starves."""

from __future__ import annotations

import math
from collections import defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.fair_queue import QUANTUM_SECONDS, FairQueue, WorkEstimate

# Quarters of a second: their sums are exact.
SECONDS = st.integers(1, 40).map(lambda quarters: quarters / 4)
TENANTS = st.sampled_from("abc")
ITEMS = st.lists(st.tuples(TENANTS, SECONDS), max_size=60)
WEIGHTS = st.fixed_dictionaries({tenant: st.integers(1, 4) for tenant in "abc"})

Item = tuple[int, str, float]


def filled(items: list[tuple[str, float]], weights: dict[str, int]) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(lambda tenant: weights[tenant])
    for number, (tenant, seconds) in enumerate(items):
        queue.add((number, tenant, seconds), tenant=tenant, seconds=seconds)
    return queue


def drained(queue: FairQueue[Item]) -> list[Item]:
    order = []
    while (item := queue.first()) is not None:
        assert queue.first() == item, "it stays the first"
        queue.take(item)
        order.append(item)
    assert len(queue) == 0
    return order


@given(ITEMS, WEIGHTS)
def test_every_item_leaves_once_and_each_tenants_in_order(
    items: list[tuple[str, float]], weights: dict[str, int]
) -> None:
    order = drained(filled(items, weights))
    assert sorted(number for number, _, _ in order) == list(range(len(items)))
    for tenant in "abc":
        numbers = [number for number, whose, _ in order if whose == tenant]
        assert numbers == sorted(numbers)


@given(st.lists(SECONDS, max_size=60), st.integers(1, 4))
def test_one_tenant_has_the_order_of_arrival(seconds: list[float], weight: int) -> None:
    order = drained(filled([("a", one) for one in seconds], {"a": weight}))
    assert [number for number, _, _ in order] == list(range(len(seconds)))


@given(ITEMS, WEIGHTS)
def test_before_an_item_each_other_tenant_gets_its_share_and_less_than_one_quantum_more(
    items: list[tuple[str, float]], weights: dict[str, int]
) -> None:
    done: defaultdict[str, float] = defaultdict(float)
    for _, tenant, seconds in drained(filled(items, weights)):
        done[tenant] += seconds
        num_turns = math.ceil(done[tenant] / (QUANTUM_SECONDS * weights[tenant]))
        for other in done.keys() - {tenant}:
            quantum = QUANTUM_SECONDS * weights[other]
            assert done[other] <= num_turns * quantum
            share = done[tenant] * weights[other] / weights[tenant]
            assert done[other] < share + quantum


@given(st.lists(SECONDS, min_size=1, max_size=30), st.lists(SECONDS, max_size=200))
def test_a_flood_delays_the_requests_of_others_by_their_own_work_and_one_quantum(
    own: list[float], flood: list[float]
) -> None:
    """Beside an endless flood, a request waits for its own tenant's work twice, and a quantum."""
    items = [("b", one) for one in flood] + [("a", one) for one in own]
    waited, own_work = 0.0, 0.0
    for _, tenant, seconds in drained(filled(items, dict.fromkeys("ab", 1))):
        waited += seconds
        if tenant == "a":
            own_work += seconds
            assert waited < 2 * own_work + QUANTUM_SECONDS


@given(st.lists(SECONDS, min_size=1, max_size=60), st.integers(0, 59), st.integers(1, 4).map(float))
def test_who_comes_during_a_flood_waits_for_one_turn_of_it(
    flood: list[float], num_before: int, quarters: float
) -> None:
    queue = filled([("b", one) for one in flood], dict.fromkeys("ab", 1))
    for _ in range(min(num_before, len(flood))):
        first = queue.first()
        assert first is not None
        queue.take(first)
    late = (1000, "a", quarters / 4)
    queue.add(late, tenant="a", seconds=quarters / 4)
    waited = 0.0
    while (item := queue.first()) != late:
        assert item is not None
        queue.take(item)
        waited += item[2]
    assert waited <= QUANTUM_SECONDS + max(flood)


@given(SECONDS, SECONDS)
def test_nobody_starves_beside_a_tenant_that_never_ends(own: float, others: float) -> None:
    queue = filled([("b", others)], dict.fromkeys("ab", 1))
    target = (1000, "a", own)
    queue.add(target, tenant="a", seconds=own)
    waited, number = 0.0, 0
    while (item := queue.first()) != target:
        assert item is not None
        number += 1
        queue.add((number, "b", others), tenant="b", seconds=others)
        queue.take(item)
        waited += others
        assert waited <= own + others + QUANTUM_SECONDS


def test_items_without_work_take_turns_too() -> None:
    queue = filled([("b", 0.0)] * 5000 + [("a", 0.5)], dict.fromkeys("ab", 1))
    order = [tenant for _, tenant, _ in drained(queue)]
    assert order.index("a") <= 1001


@given(st.lists(st.one_of(st.tuples(TENANTS, SECONDS), st.integers(0, 59), st.none())), WEIGHTS)
def test_items_come_and_leave_in_any_order(
    steps: list[tuple[str, float] | int | None], weights: dict[str, int]
) -> None:
    """Against lists: an item is first only if it is the first of its tenant, until none is left."""
    queue: FairQueue[Item] = FairQueue(lambda tenant: weights[tenant])
    lines: dict[str, deque[Item]] = {tenant: deque() for tenant in "abc"}
    for number, step in enumerate(steps):
        here = [item for line in lines.values() for item in line]
        if isinstance(step, tuple):
            item = (number, *step)
            queue.add(item, tenant=step[0], seconds=step[1])
            lines[step[0]].append(item)
        elif step is None:
            first = queue.first()
            assert (first is None) == (not here)
            if first is not None:
                assert first == lines[first[1]].popleft()
                queue.take(first)
        elif here:
            item = here[step % len(here)]
            lines[item[1]].remove(item)
            queue.discard(item)
            queue.discard(item)
        assert len(queue) == sum(map(len, lines.values()))
    left = drained(queue)
    for tenant, line in lines.items():
        assert [item for item in left if item[1] == tenant] == list(line)


def test_an_estimate_follows_the_requests_that_ended() -> None:
    estimate = WorkEstimate()
    for _ in range(500):
        estimate.ended(1000, 101, prompt_seconds=2.0, output_seconds=1.0)
    assert math.isclose(estimate.seconds(1000, 10_000), 2.0 + 1.01, rel_tol=1e-3)
    assert math.isclose(estimate.seconds(500, 10), 1.0 + 0.1, rel_tol=1e-3)


def test_a_request_without_an_answer_or_a_prompt_changes_no_rate() -> None:
    estimate, before = WorkEstimate(), WorkEstimate()
    estimate.ended(0, 1, prompt_seconds=5.0, output_seconds=5.0)
    assert estimate.prompt_token_seconds == before.prompt_token_seconds
    assert estimate.output_token_seconds == before.output_token_seconds
