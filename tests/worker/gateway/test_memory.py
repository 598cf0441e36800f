"""What requests hold in a gateway stays within its budget, and comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.body import (
    BODY_SECONDS,
    BODY_SILENCE_SECONDS,
    MAX_BODY_BYTES,
    MAX_REST_BYTES,
    MAX_VALUES,
    min_bytes,
)
from vlm_worker.gateway.memory import (
    CHARACTER_BYTES,
    CONNECTION_BYTES,
    COPIES,
    VALUE_BYTES,
    Bound,
    FullError,
    Kind,
    MemoryBudget,
    declare,
)
from vlm_worker.settings.values import MIN_MEMORY_BYTES

events = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["admit", "decode", "add", "prepared", "release"]),
        st.integers(0, 700),
    ),
    max_size=60,
)


@given(events=events, shared=st.booleans())
def test_no_more_is_held_than_the_budget_nor_by_a_tenant_than_its_share(
    events: list[tuple[int, str, int]], shared: bool
) -> None:
    budget = MemoryBudget(1000)
    held = [budget.hold(str(i % 2), shared=shared) for i in range(6)]
    for index, event, count in events:
        one = held[index]
        before = one.num_bytes
        if event == "admit":
            try:
                one.admit(count)
            except FullError:
                assert one.num_bytes == before
        elif event == "decode":
            try:
                one.decode(count // CHARACTER_BYTES, 0)
            except FullError:
                assert one.num_bytes == before
        elif event == "add":
            try:
                one.add(count)
            except FullError:
                assert one.num_bytes == before
        elif event == "prepared":
            one.prepared(count)
            assert one.num_bytes <= before
        else:
            one.release()
        assert budget.used_in_all == sum(h.num_bytes for h in held) <= 1000
        for tenant in range(2):
            mine = [h.num_bytes for h in held[tenant::2] if h.num_bytes]
            if shared and len(mine) > 1 and one in held[tenant::2] and one.num_bytes > before:
                assert sum(mine) <= 500
    for one in held:
        one.release()
        one.release()
    assert budget.used_in_all == budget.used(Kind.BODY) == budget.used(Kind.PROMPT) == 0


def test_a_refusal_names_its_limit_and_a_retry_time() -> None:
    budget = MemoryBudget(1000)
    budget.hold("a", shared=True).admit(250)
    for tenant, shared, bound in (("a", True, Bound.TENANT_MEMORY), ("b", False, Bound.MEMORY)):
        with pytest.raises(FullError) as refused:
            budget.hold(tenant, shared=shared).admit(300)
        assert refused.value.bound is bound
        assert refused.value.retry_after_seconds > 0


def test_a_body_that_grows_holds_what_it_has_grown_to() -> None:
    budget = MemoryBudget(1000)
    one = budget.hold("a", shared=False)
    for size in (100, 50, 300):
        one.admit(size)
    assert budget.used(Kind.BODY) == COPIES * 300
    one.prepared(20)
    assert (budget.used(Kind.BODY), budget.used(Kind.PROMPT)) == (0, 20)


@given(announced=st.integers(0, MAX_BODY_BYTES), seconds=st.floats(0, 2 * BODY_SECONDS))
def test_a_body_must_come_as_fast_as_its_whole_length_in_the_time_for_it(
    announced: int, seconds: float
) -> None:
    least = min_bytes(announced, seconds)
    assert least >= 0
    if seconds <= BODY_SILENCE_SECONDS:
        assert least == 0
    if seconds >= BODY_SECONDS:
        assert least >= announced
    assert min_bytes(announced, seconds + 1) >= least


def test_the_largest_body_is_decoded_within_the_least_budget_of_several_tenants() -> None:
    held = MemoryBudget(MIN_MEMORY_BYTES).hold("a", shared=True)
    held.admit(MAX_BODY_BYTES)
    held.decode(MAX_REST_BYTES, MAX_VALUES)
    assert held.num_bytes <= MIN_MEMORY_BYTES


def test_values_are_held_before_they_are_decoded_and_refused_beyond_the_budget() -> None:
    budget = MemoryBudget(1000)
    one, other = (budget.hold("a", shared=False) for _ in range(2))
    one.admit(100)
    one.decode(20, 1)
    assert one.num_bytes == COPIES * 100 + CHARACTER_BYTES * 20 + VALUE_BYTES
    other.admit(10)
    with pytest.raises(FullError) as refused:
        other.decode(10, 1)
    assert refused.value.bound is Bound.MEMORY
    assert other.num_bytes == COPIES * 10


def test_a_gateway_declares_its_requests_connections_and_all_that_it_has_beside_them() -> None:
    declared = declare(
        512 << 20, 1000, resident_bytes=80 << 20, kept_bytes=192 << 20, limit_bytes=None
    )
    assert declared.requests == 512 << 20
    assert declared.connections == 1000 * CONNECTION_BYTES
    assert declared.process == 80 << 20
    assert declared.total == sum(declared.by_part().values())


@given(limit=st.integers(0, 2 << 30))
def test_requests_get_what_the_container_leaves_but_never_too_little_for_one(limit: int) -> None:
    declared = declare(
        512 << 20, 1000, resident_bytes=80 << 20, kept_bytes=192 << 20, limit_bytes=limit
    )
    assert MIN_MEMORY_BYTES <= declared.requests <= 512 << 20
    assert declared.total <= limit or declared.requests == MIN_MEMORY_BYTES
