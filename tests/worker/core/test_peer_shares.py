"""Laws of reservations by peer; the module states them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.peer_shares import PeerShares

CAPACITY = 800


@given(st.integers(1, 2 * CAPACITY))
def test_the_first_reservation_of_a_peer_is_admitted_however_large(num_tokens: int) -> None:
    assert PeerShares().admits("a", num_tokens, capacity=CAPACITY)


@given(st.lists(st.integers(1, CAPACITY // 4), max_size=50))
def test_one_peer_leaves_an_eighth_for_another_one(asked: list[int]) -> None:
    shares = PeerShares()
    for number, num_tokens in enumerate(asked):
        if shares.admits("a", num_tokens, capacity=CAPACITY):
            shares.add(f"r-{number}", "a", num_tokens)
    assert shares.of("a") <= CAPACITY * 7 // 8
    assert shares.admits("b", CAPACITY // 8, capacity=CAPACITY)


def test_a_peer_that_would_take_all_is_refused_until_a_reservation_of_its_own_ends() -> None:
    shares = PeerShares()
    shares.add("r-1", "a", 400)
    shares.add("r-2", "a", 300)
    assert not shares.admits("a", 1, capacity=CAPACITY)
    shares.keep({"r-2"}.__contains__)
    assert shares.of("a") == 300
    assert shares.admits("a", 400, capacity=CAPACITY)
