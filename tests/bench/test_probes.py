"""Rounds count in which the machine was the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from probes import LEAST_ROUNDS, MOST_MOVED, Rounds, alike

limits = st.lists(st.floats(0.1, 100), min_size=1, max_size=9)


def figures(peaks: list[float], seconds: list[float]) -> dict[str, object]:
    """Of so many operations as one peak of 1 does in a second."""
    rounds = Rounds({"case": lambda: None}, threads=1)
    rounds.peaks, rounds.bandwidths = peaks, [1.0] * len(peaks)
    rounds.seconds = {"case": seconds}
    return rounds.figures("case", num_bytes=0, operations=1.0, goal=0.5)


@given(limits)
def test_rounds_that_count_are_alike(values: list[float]) -> None:
    counted = [values[i] for i in alike(values)]
    assert max(counted, default=1.0) <= min(counted, default=1.0) * MOST_MOVED * (1 + 1e-9)


@given(st.integers(1, 4), st.floats(1.31, 10))
def test_a_minority_of_slow_rounds_changes_nothing(number: int, slower: float) -> None:
    quiet, busy = number + LEAST_ROUNDS, number
    peaks = [1.0] * quiet + [1 / slower] * busy
    seconds = [1.25] * quiet + [100.0] * busy
    found = figures(peaks, seconds)
    assert (found["of_limit"], found["met"], found["probes_moved"]) == (0.8, True, 1.0)
    assert found["rounds"] == [quiet, quiet + busy]


def test_where_no_rounds_are_alike_the_limit_is_not_known() -> None:
    found = figures([1.0, 2.0, 4.0, 8.0], [1.0] * 4)
    assert found["met"] is None
    assert found["probes_moved"] == pytest.approx(8.0)
