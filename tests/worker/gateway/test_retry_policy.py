"""How much a gateway retries, and how many wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.errors import OverloadedError
from vlm_worker.gateway.orchestrate.generation import (
    RETRIES_PER_REQUEST,
    RETRIES_PER_SECOND,
    RequestLimit,
    RetryBudget,
)

events = st.lists(st.one_of(st.just("request"), st.floats(0, 2)), max_size=300)


@given(burst=st.integers(0, 20), events=events)
def test_retries_stay_within_the_burst_a_tenth_of_the_requests_and_one_a_second(
    burst: int, events: list[str | float]
) -> None:
    budget, now, num_requests, num_retries = RetryBudget(burst, now=0.0), 0.0, 0, 0
    for event in events:
        if isinstance(event, float):
            now += event
            num_retries += budget.take(now=now)
        else:
            num_requests += 1
            budget.request()
    bound = burst + RETRIES_PER_REQUEST * num_requests + RETRIES_PER_SECOND * now
    assert num_retries <= bound + 1e-6


def test_a_full_budget_moves_all_requests_of_a_pod_that_dies() -> None:
    budget = RetryBudget(256, now=0.0)
    assert all(budget.take(now=0.0) for _ in range(256))
    assert not budget.take(now=0.0)
    assert budget.take(now=1.0)


@given(size=st.integers(0, 5), arriving=st.integers(0, 12))
def test_no_more_wait_than_there_is_room(size: int, arriving: int) -> None:
    limit, places, num_refused = RequestLimit(size), [], 0
    for _ in range(arriving):
        try:
            places.append(limit.enter())
        except OverloadedError:
            num_refused += 1
    assert limit.num_waiting == len(places) == min(size, arriving)
    assert num_refused == arriving - len(places)
    for ticket in places:
        ticket.leave()
        ticket.leave()
    assert limit.num_waiting == 0


def test_a_request_beyond_the_limit_gets_a_retry_time() -> None:
    with pytest.raises(OverloadedError) as refused:
        RequestLimit(0).enter()
    assert refused.value.retry_after_seconds > 0


def test_a_request_that_pauses_gives_its_place_away_until_it_goes_on() -> None:
    limit = RequestLimit(1)
    with limit.enter() as ticket:
        with limit.paused(ticket):
            assert limit.num_waiting == 0
        assert limit.num_waiting == 1
        other = None
        with pytest.raises(OverloadedError), limit.paused(ticket):
            other = limit.enter()
        assert other is not None
        other.leave()
        with pytest.raises(KeyError), limit.paused(ticket):
            raise KeyError
    assert limit.num_waiting == 0


def test_a_ticket_is_returned_whatever_ends_the_wait() -> None:
    limit = RequestLimit(1)
    with pytest.raises(KeyError), limit.enter():
        raise KeyError
    assert limit.num_waiting == 0
