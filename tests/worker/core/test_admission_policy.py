"""Whose turn it is: by backlog, in turn, and within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.core.test_admission_queue import waiting_sequence

from vlm_worker.core.admission_policy import (
    AdmissionQueue,
    AdmissionReason,
    AdmissionRound,
    lane_quotas,
    preemption_order,
)
from vlm_worker.core.sequence import Lane
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings

DUAL = AdmissionSettings(AdmissionPolicy.DUAL_QUEUE)


def order(text: int, vision: int, *, last_first: Lane) -> list[tuple[str, int, str]]:
    backlog = {Lane.TEXT: text, Lane.VISION: vision}
    return [
        (quota.lane.value, quota.count, quota.reason.value)
        for quota in lane_quotas(backlog, DUAL, last_first=last_first)
    ]


@pytest.mark.parametrize("last_first", Lane)
@pytest.mark.parametrize(
    ("text", "vision", "first"),
    [
        pytest.param(64, 17, "vision", id="more than twice eight images wait"),
        pytest.param(65, 16, "text", id="more than twice 32 texts wait"),
    ],
)
def test_the_backed_up_lane_goes_first_with_its_whole_bound(
    text: int, vision: int, first: str, last_first: Lane
) -> None:
    whole, half = {"text": (32, 4), "vision": (8, 16)}[first]
    second = "text" if first == "vision" else "vision"
    assert order(text, vision, last_first=last_first) == [
        (first, whole, "backlog"),
        (second, half, "filling"),
    ]


def test_lanes_that_are_both_backed_up_go_first_in_turn() -> None:
    assert order(65, 17, last_first=Lane.TEXT)[0] == ("vision", 8, "backlog")
    assert order(65, 17, last_first=Lane.VISION)[0] == ("text", 32, "backlog")


def test_without_backlog_half_of_each_goes_in_turn() -> None:
    mixed = [("text", 16, "balanced"), ("vision", 4, "balanced")]
    assert order(64, 16, last_first=Lane.VISION) == mixed
    assert order(64, 16, last_first=Lane.TEXT) == mixed[::-1]


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0.0, 20.0),
    st.sampled_from(Lane),
)
def test_a_wave_admits_no_more_of_a_lane_than_its_bound(
    text: int, vision: int, max_text: int, max_vision: int, now: float, last_first: Lane
) -> None:
    settings = AdmissionSettings(
        AdmissionPolicy.DUAL_QUEUE, max_text, max_vision, ageing_seconds=10.0
    )
    waiting = AdmissionQueue(settings)
    lanes = [Lane.TEXT] * text + [Lane.VISION] * vision
    for number, lane in enumerate(lanes if last_first is Lane.TEXT else lanes[::-1]):
        waiting.add(waiting_sequence(number, lane=lane))
    admitted = dict.fromkeys(Lane, 0)
    with AdmissionRound(waiting, now=now) as admission_round:
        while (sequence := admission_round.next()) is not None:
            admission_round.admit(sequence)
            admitted[sequence.lane] += 1
    assert admitted[Lane.TEXT] <= max_text
    assert admitted[Lane.VISION] <= max_vision
    assert sum(admitted.values()) >= min(text + vision, 1)  # somebody always enters
    assert len(waiting) == text + vision - sum(admitted.values())


def test_one_that_has_waited_for_long_goes_before_any_priority_and_any_backlog() -> None:
    waiting = AdmissionQueue(AdmissionSettings(AdmissionPolicy.DUAL_QUEUE, ageing_seconds=10.0))
    old = waiting_sequence(0, priority=-5, lane=Lane.VISION)
    waiting.add(old)
    for number in range(1, 100):
        waiting.add(waiting_sequence(number, priority=5, now=1.0))
    with AdmissionRound(waiting, now=9.9) as admission_round:
        assert admission_round.next() is not old
    with AdmissionRound(waiting, now=10.0) as admission_round:
        assert admission_round.next() is old
        assert admission_round.admit(old) is AdmissionReason.AGED


def test_the_youngest_of_the_lowest_priority_is_the_least_important() -> None:
    high, low, lower_and_older = (
        waiting_sequence(arrival, priority=priority)
        for arrival, priority in ((5, 1), (7, 0), (6, 0))
    )
    assert sorted([low, high, lower_and_older], key=preemption_order) == [
        high,
        lower_and_older,
        low,
    ]
    low.aged_priority = 2
    assert sorted([low, high, lower_and_older], key=preemption_order) == [
        low,
        high,
        lower_and_older,
    ]


def test_a_lane_that_could_never_move_is_refused() -> None:
    with pytest.raises(ValueError, match="max_vision \\(0\\) must be at least 1"):
        AdmissionSettings(max_vision=0)
