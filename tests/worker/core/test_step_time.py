"""Predicted work follows the line through the measured steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.step_time import StepTimeModel, retry_after


@given(st.floats(0, 0.1), st.floats(1e-6, 0.01), st.lists(st.integers(1, 2000), min_size=2))
def test_a_line_is_found_again(base: float, slope: float, units: list[int]) -> None:
    model = StepTimeModel()
    for count in [*units, 10, 1000, 400]:
        model.observe(count, base + slope * count)
    predicted = model.predict(1000, units_per_step=500)
    assert predicted == pytest.approx(2 * base + 1000 * slope, rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), max_size=20))
def test_predictions_are_never_negative(steps: list[tuple[int, float]]) -> None:
    model = StepTimeModel()
    for units, seconds in steps:
        model.observe(units, seconds)
    assert model.seconds_per_unit >= 0
    assert model.predict(100, units_per_step=10) >= 0


def test_nothing_measured_predicts_nothing() -> None:
    assert StepTimeModel().predict(100, units_per_step=10) == 0


def test_steps_of_one_size_give_their_mean_rate() -> None:
    model = StepTimeModel()
    for _ in range(10):
        model.observe(100, 0.5)
    assert model.predict(200, units_per_step=100) == pytest.approx(1.0)


@given(st.floats(0, 1e9))
def test_a_full_queue_gives_a_bounded_retry_time(seconds: float) -> None:
    assert 0.1 <= retry_after(seconds) <= 30
    assert retry_after(seconds) == seconds or not 0.1 <= seconds <= 30
