"""The limit stays within its bounds, and finds the target where there is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.step_time import BAND, CHANGE, WINDOW, AdaptiveLimit, LimitReason

TARGET = 0.2
bounds = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda b: (b[0], b[0] + b[1]))


@given(bounds, st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100)), max_size=200))
def test_it_stays_within_its_bounds_and_moves_by_two_a_window(
    low_high: tuple[int, int], steps: list[tuple[float, int]]
) -> None:
    low, high = low_high
    adaptive = AdaptiveLimit(TARGET, minimum=low, maximum=high)
    before = adaptive.limit.value
    for number, (seconds, num_running) in enumerate(steps, start=1):
        limit = adaptive.observe(seconds, num_running=num_running)
        assert low <= limit.value <= high
        assert limit.value <= before + CHANGE
        if number % WINDOW:
            assert limit.value == before
        before = limit.value


@given(
    bounds,
    st.floats(0.0, 0.3),
    # A change of the limit moves a step by less than the band is wide: it cannot jump over.
    st.floats(0.0001, 2 * BAND * TARGET / CHANGE * 0.99),
    st.integers(1, 64),
)
def test_it_settles_where_steps_that_grow_with_the_batch_meet_the_target(
    low_high: tuple[int, int], base: float, per_sequence: float, start: int
) -> None:
    low, high = low_high
    adaptive = AdaptiveLimit(TARGET, minimum=low, maximum=high, start=start)
    for _ in range(WINDOW * (high - low + CHANGE)):
        running = adaptive.limit.value  # more wait than may run
        adaptive.observe(base + per_sequence * running, num_running=running)
    limit = adaptive.limit
    seconds = base + per_sequence * limit.value
    if limit.reason is LimitReason.ON_TARGET:
        assert (1 - BAND) * TARGET <= seconds <= (1 + BAND) * TARGET
    else:
        assert limit.reason is LimitReason.AT_BOUND
        assert limit.value == (low if seconds > TARGET else high)
    for _ in range(3 * WINDOW):  # and there it stays
        assert adaptive.observe(seconds, num_running=limit.value) == limit


@pytest.mark.parametrize(
    ("seconds", "num_running", "value", "reason"),
    [
        pytest.param(0.25, 8, 6, LimitReason.SLOWER, id="too slow"),
        pytest.param(0.25, 4, 2, LimitReason.SLOWER, id="too slow with fewer than might run"),
        pytest.param(0.235, 8, 8, LimitReason.ON_TARGET, id="almost too slow"),
        pytest.param(0.165, 8, 8, LimitReason.ON_TARGET, id="almost fast"),
        pytest.param(0.15, 8, 10, LimitReason.FASTER, id="fast"),
        pytest.param(0.15, 7, 8, LimitReason.UNUSED, id="fast with fewer than might run"),
    ],
)
def test_ten_steps_decide(
    seconds: float, num_running: int, value: int, reason: LimitReason
) -> None:
    adaptive = AdaptiveLimit(TARGET, maximum=32)
    assert (adaptive.limit.value, adaptive.limit.reason) == (8, LimitReason.STARTING)
    for _ in range(WINDOW - 1):
        assert adaptive.observe(seconds, num_running=num_running).reason is LimitReason.STARTING
    limit = adaptive.observe(seconds, num_running=num_running)
    assert (limit.value, limit.reason) == (value, reason)


def test_without_a_target_as_many_run_as_there_are_rows() -> None:
    adaptive = AdaptiveLimit(None, maximum=32)
    for _ in range(2 * WINDOW):
        limit = adaptive.observe(9.0, num_running=32)
    assert (limit.value, limit.reason) == (32, LimitReason.FIXED)
