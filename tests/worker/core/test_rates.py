"""Rates are what happened in the window by its length, however often anybody notes or asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.measurements import SAMPLE_SECONDS, Rates


@given(
    st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 50)), max_size=60),
    st.floats(0, 200),
)
def test_a_rate_is_the_growth_within_the_window(
    growths: list[tuple[float, int]], rest: float
) -> None:
    now = total = 0.0
    rates = Rates(now)
    grown: list[tuple[float, int]] = []
    for pause, count in growths:
        now += pause
        total += count
        grown.append((now, count))
        rates.note(now, {"n": total})
    now += rest
    found = rates.per_second(now, {"n": total})["n"]
    begin = max(now - rates.window_seconds, 0.0)
    # a sample stands for one second, so what grew at the window's edge may count or not
    inside = sum(count for at, count in grown if at > begin + SAMPLE_SECONDS)
    around = sum(count for at, count in grown if at > begin - SAMPLE_SECONDS)
    span = max(now - begin, SAMPLE_SECONDS)
    assert inside / span - 1e-9 <= found <= around / span + 1e-9


def test_a_burst_within_one_second_is_forgotten_when_the_window_has_passed() -> None:
    rates = Rates(0.0)
    for step in range(9):
        rates.note(step / 10, {"n": 100.0 * step})
    assert rates.per_second(600.0, {"n": 800.0}) == {"n": 0.0}


def test_a_young_process_divides_by_its_age() -> None:
    rates = Rates(100.0)
    assert rates.per_second(110.0, {"n": 50.0})["n"] == pytest.approx(5.0)


def test_samples_of_an_hour_do_not_pile_up() -> None:
    rates = Rates(0.0)
    for tenth in range(36_000):
        rates.note(tenth / 10, {"n": float(tenth)})
    assert len(rates._samples) <= rates.window_seconds / SAMPLE_SECONDS + 2
