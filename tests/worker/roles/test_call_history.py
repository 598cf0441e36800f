"""Calls and cancels are remembered as long as they may be repeated, and no longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.roles.call_history import MAX_REMEMBERED, REMEMBER_SECONDS, CallHistory
from vlm_worker.types import RequestKey

keys = st.builds(RequestKey, st.sampled_from("abc"), st.integers(1, 3))


@given(st.lists(st.tuples(st.sampled_from(["Prefill", "Decode"]), keys), max_size=30))
def test_only_the_first_call_of_an_attempt_is_new(calls: list[tuple[str, RequestKey]]) -> None:
    history, seen = CallHistory(), set()
    for now, (name, key) in enumerate(calls):
        assert history.begin(name, key, now=float(now)) == ((name, key) not in seen)
        seen.add((name, key))


@given(keys, keys)
def test_a_cancel_is_of_one_attempt(cancelled: RequestKey, other: RequestKey) -> None:
    history = CallHistory()
    history.cancel(cancelled, now=0.0)
    assert history.was_cancelled(other, now=1.0) == (other == cancelled)


def test_a_refused_call_may_come_again() -> None:
    history, key = CallHistory(), RequestKey("a", 1)
    assert history.begin("Reserve", key, now=0.0)
    history.forget("Reserve", key)
    assert history.begin("Reserve", key, now=1.0)


def test_what_is_old_is_forgotten() -> None:
    history, key = CallHistory(), RequestKey("a", 1)
    history.begin("Prefill", key, now=0.0)
    history.cancel(key, now=0.0)
    assert history.was_cancelled(key, now=REMEMBER_SECONDS - 1)
    assert not history.was_cancelled(key, now=REMEMBER_SECONDS)
    assert history.begin("Prefill", key, now=REMEMBER_SECONDS)


def test_the_number_remembered_is_bounded() -> None:
    history = CallHistory()
    for number in range(MAX_REMEMBERED + 10):
        history.cancel(RequestKey(str(number), 1), now=0.0)
    assert len(history._cancelled) <= MAX_REMEMBERED
    assert history.was_cancelled(RequestKey(str(MAX_REMEMBERED + 9), 1), now=0.0)
