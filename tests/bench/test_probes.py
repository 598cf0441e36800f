"""Rounds count if the machine had the same speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from probes import MAX_PROBE_RATIO, MIN_ROUNDS, Rounds, stable_rounds

limits = st.lists(st.floats(0.1, 100), min_size=1, max_size=9)


def figures(
    peaks: list[float], seconds: list[float], machine_peaks: list[float | None] | None = None
) -> dict[str, object]:
    """The figures of a case with one operation."""
    rounds = Rounds({"case": lambda: None}, threads=1)
    rounds.peaks, rounds.bandwidths = peaks, [1.0] * len(peaks)
    rounds.machine_peaks = machine_peaks or [None] * len(peaks)
    rounds.seconds = {"case": seconds}
    return rounds.figures("case", num_bytes=0, operations=1.0, goal=0.5)


@given(limits)
def test_rounds_that_count_are_within_the_ratio(values: list[float]) -> None:
    counted = [values[i] for i in stable_rounds(values)]
    assert max(counted, default=1.0) <= min(counted, default=1.0) * MAX_PROBE_RATIO * (1 + 1e-9)


@given(st.integers(1, 4), st.floats(1.31, 10))
def test_a_minority_of_slow_rounds_changes_nothing(number: int, slower: float) -> None:
    quiet, busy = number + MIN_ROUNDS, number
    peaks = [1.0] * quiet + [1 / slower] * busy
    seconds = [1.25] * quiet + [100.0] * busy
    found = figures(peaks, seconds)
    assert (found["of_limit"], found["met"], found["probes_moved"]) == (0.8, True, 1.0)
    assert found["rounds"] == [quiet, quiet + busy]


def test_if_no_rounds_are_stable_the_limit_is_unknown() -> None:
    found = figures([1.0, 2.0, 4.0, 8.0], [1.0] * 4)
    assert found["met"] is None
    assert found["probes_moved"] == pytest.approx(8.0)


def test_the_share_of_the_machines_peak_is_reported_too() -> None:
    found = figures([1.0] * 3, [1.25] * 3, [2.0] * 3)
    assert (found["of_limit"], found["of_machine"]) == (0.8, 0.4)
    assert "of_machine" not in figures([1.0] * 3, [1.25] * 3, [2.0, None, 2.0])


def test_the_machines_peak_is_none_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import machine_peak

    monkeypatch.setenv("PATH", "")
    machine_peak._library.cache_clear()
    assert machine_peak.machine_peak_probe(1, seconds=0.01)() is None
    machine_peak._library.cache_clear()
    monkeypatch.undo()
    found = machine_peak.machine_peak_probe(1, seconds=0.01)()
    assert found is None or found > 1e9
