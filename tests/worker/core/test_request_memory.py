"""Laws M1 to M4 of the memory that requests hold, for every order of calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlm_worker.core.request_memory import (
    ImageMemory,
    ImageReservation,
    MemoryBudget,
    UploadMemory,
    divide,
)

CAPACITY = 800
KEPT = 100
LARGEST = 700
tenants = st.sampled_from([b"a", b"b", b"c"])


class MemoryMachine(RuleBasedStateMachine):
    """Calls reserve, wait, are granted, release or cancel, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ImageMemory(CAPACITY, max_waiting=1000)
        self.waiting: list[ImageReservation] = []
        self.held: list[ImageReservation] = []

    def grant(self) -> None:
        for reservation in self.memory.granted():
            self.waiting.remove(reservation)
            self.held.append(reservation)

    @rule(num_bytes=st.integers(0, LARGEST), tenant=tenants, early=st.booleans())
    def reserves(self, num_bytes: int, tenant: bytes, early: bool) -> None:
        reservation = self.memory.reservation(num_bytes, tenant=tenant)
        if early and self.memory.take_early(reservation):
            self.held.append(reservation)
            assert self.memory.used <= CAPACITY // 2
            return
        assert self.memory.wait(reservation, num_images=1)
        self.waiting.append(reservation)
        self.grant()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def releases(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.held) - 1))
        self.memory.release(self.held.pop(number))
        self.grant()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancels(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.waiting) - 1))
        self.memory.cancel(self.waiting.pop(number))
        self.grant()

    @invariant()
    def it_stays_within_its_share(self) -> None:
        assert self.memory.used == sum(reservation.num_bytes for reservation in self.held)
        assert self.memory.used <= CAPACITY, "M1"
        assert self.memory.num_waiting == len(self.waiting)
        assert self.held or not self.waiting, "M3: a reservation waits while none is granted"

    def teardown(self) -> None:
        """M3: after all granted reservations are released, each waiting one is granted."""
        rounds = len(self.held) + len(self.waiting) + 1
        for _ in range(rounds):
            if not self.held:
                break
            self.memory.release(self.held.pop(0))
            self.grant()
        assert not self.waiting, "M3: a reservation is never granted"


MemoryMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestMemory = MemoryMachine.TestCase


class LongMemoryMachine(MemoryMachine):
    """The same, for longer."""


LongMemoryMachine.TestCase.settings = settings(max_examples=5000, stateful_step_count=80)
TestMemoryAtLength = pytest.mark.timeout(1800)(pytest.mark.full(LongMemoryMachine.TestCase))


@given(st.lists(st.integers(KEPT // 4 + 1, LARGEST), min_size=1, max_size=20))
def test_a_small_reservation_waits_for_no_large_one(sizes: list[int]) -> None:
    memory = ImageMemory(CAPACITY, max_waiting=100)
    for size in sizes:
        assert memory.wait(memory.reservation(size, tenant=b"large"), num_images=1)
    memory.granted()
    small = memory.reservation(KEPT // 4, tenant=b"small")
    assert memory.wait(small, num_images=1)
    assert small in memory.granted(), "M4"


@given(st.integers(1, 30))
def test_a_tenants_reservation_waits_for_at_most_one_of_each_other_tenant(num_before: int) -> None:
    memory = ImageMemory(CAPACITY, max_waiting=100)
    many = [memory.reservation(LARGEST, tenant=b"many") for _ in range(num_before + 1)]
    for reservation in many:
        assert memory.wait(reservation, num_images=1)
    assert memory.granted() == many[:1]
    one = memory.reservation(LARGEST, tenant=b"one")
    assert memory.wait(one, num_images=1)
    order = []
    holder = many[0]
    while granted := (memory.release(holder), memory.granted())[1]:
        (holder,) = granted
        order.append(holder)
    assert order.index(one) <= 1, "M4"
    assert len(order) == num_before + 1


@given(st.lists(st.integers(0, 400), max_size=30))
def test_uploads_are_counted_whole_and_never_beyond_their_share(parts: list[int]) -> None:
    memory = UploadMemory(1000)
    taken = [part for part in parts if memory.take(part)]
    assert memory.used == sum(taken) <= 1000
    assert memory.num_refused == len(parts) - len(taken)
    for part in taken:
        memory.release(part)
    assert memory.used == 0
    assert memory.take(1000), "one upload alone can have all of it"


def test_too_many_waiting_images_are_refused_but_one_call_alone_never_is() -> None:
    memory = ImageMemory(CAPACITY, max_waiting=4)
    reservations = [memory.reservation(LARGEST, tenant=b"a") for _ in range(3)]
    assert memory.wait(reservations[0], num_images=9)
    assert memory.granted() == reservations[:1]
    assert memory.wait(reservations[1], num_images=9)
    assert not memory.wait(reservations[2], num_images=1)
    assert memory.num_refused == 1


DEFAULTS = {"uploads": 500, "images": 1500, "embeddings": 300, "exposed": 200}


def test_the_default_is_the_sum_of_the_bounds() -> None:
    budget = divide(None, **DEFAULTS, least_uploads=50, least_images=100)
    assert budget == MemoryBudget(500, 1500, 300, 200)
    assert budget.total == 2500


@given(st.integers(650, 10_000))
def test_a_given_total_is_what_the_shares_add_up_to(total: int) -> None:
    budget = divide(total, **DEFAULTS, least_uploads=50, least_images=100)
    assert budget.total == total
    assert (budget.embeddings, budget.exposed) == (300, 200)
    assert budget.uploads >= 50
    assert budget.images >= 100


def test_too_little_is_said_with_what_is_enough() -> None:
    with pytest.raises(ValueError, match="at least 650"):
        divide(649, **DEFAULTS, least_uploads=50, least_images=100)


def test_a_worker_without_images_keeps_its_own_bounds() -> None:
    own = {"uploads": 0, "images": 0, "embeddings": 300, "exposed": 0}
    least = {"least_uploads": 50, "least_images": 100}
    assert divide(5000, **own, **least).total == 300
    with pytest.raises(ValueError, match="at least 300"):
        divide(299, **own, **least)
