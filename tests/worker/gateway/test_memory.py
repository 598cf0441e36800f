"""What requests hold in a gateway stays within its budget, and comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.body import (
    BODY_SECONDS,
    BODY_SILENCE_SECONDS,
    MAX_BODY_BYTES,
    least_bytes,
)
from vlm_worker.gateway.memory import COPIES, Bound, FullError, Kind, MemoryBudget

events = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(["admit", "prepared", "release"]), st.integers(0, 700)
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
        elif event == "prepared":
            one.prepared(count)
            assert one.num_bytes <= before
        else:
            one.release()
        assert budget.used_in_all == sum(h.num_bytes for h in held) <= 1000
        for tenant in range(2):
            assert not shared or sum(h.num_bytes for h in held[tenant::2]) <= 500
    for one in held:
        one.release()
        one.release()
    assert budget.used_in_all == budget.used(Kind.BODY) == budget.used(Kind.PROMPT) == 0


def test_a_refusal_says_which_bound_it_was_and_when_to_come_back() -> None:
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
    least = least_bytes(announced, seconds)
    assert least >= 0
    if seconds <= BODY_SILENCE_SECONDS:
        assert least == 0
    if seconds >= BODY_SECONDS:
        assert least >= announced
    assert least_bytes(announced, seconds + 1) >= least
