"""The laws of limits (`core.limits`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.limits import Demand, Limits, QueueLimit, fits
from vlm_worker.errors import OverloadedError


@given(st.integers(1, 1600), st.integers(0, 800))
def test_a_demand_alone_is_accepted_whatever_its_size(demand: int, maximum: int) -> None:
    assert fits(0, demand, maximum=maximum)


@given(st.lists(st.integers(1, 200), max_size=50))
def test_two_demands_or_more_never_exceed_the_maximum(demands: list[int]) -> None:
    accepted: list[int] = []
    for demand in demands:
        if fits(sum(accepted), demand, maximum=100):
            accepted.append(demand)
    assert sum(accepted) <= 100 or len(accepted) == 1


def test_the_first_exceeded_limit_is_named_and_counted() -> None:
    limits = Limits()
    demands = [
        Demand(QueueLimit.REQUESTS, 3, 1, 4),
        Demand(QueueLimit.TOKENS, 90, 20, 100),
        Demand(QueueLimit.UNREAD, 9, 0, 8),
    ]
    with pytest.raises(OverloadedError, match="90 tokens wait, 100 may") as refused:
        limits.check(demands, retry_after_seconds=lambda: 7.0)
    assert refused.value.retry_after_seconds == 7.0
    assert limits.num_refused == {QueueLimit.TOKENS: 1}
    limits.check(demands[:1], retry_after_seconds=lambda: 7.0)


def test_one_prompt_above_the_limit_that_no_peer_has_read_refuses_the_next_one() -> None:
    """It was admitted alone; a demand of 0 asks whether the computed KV exceeds the limit."""
    assert fits(0, 9, maximum=8)
    assert not fits(9, 0, maximum=8)
    assert fits(8, 0, maximum=8)


def test_more_images_than_the_queue_holds_are_refused_even_if_it_is_empty() -> None:
    assert Demand(QueueLimit.IMAGES, 0, 3, 2).is_exceeded
    assert not Demand(QueueLimit.PIXELS, 0, 3, 2).is_exceeded
