"""Intervals of shares and of paired differences."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from paired import Paired, bonett_price, wilson

answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def pairs_of(both: list[tuple[bool, bool]]) -> Paired:
    return Paired.of([here for here, _ in both], [other for _, other in both])


@given(answers)
def test_an_exchange_of_the_settings_exchanges_lost_and_won(both: list[tuple[bool, bool]]) -> None:
    here, there = pairs_of(both), pairs_of([(b, a) for a, b in both])
    assert (here.lost, here.won) == (there.won, there.lost)
    assert here.difference == -there.difference
    low, high = here.difference_interval
    assert (-high, -low) == pytest.approx(there.difference_interval)


@given(answers)
def test_the_difference_is_that_of_the_shares(both: list[tuple[bool, bool]]) -> None:
    here, there = pairs_of(both), pairs_of([(b, a) for a, b in both])
    assert here.difference == pytest.approx(here.share - there.share)


@given(answers)
def test_an_interval_has_a_width_and_contains_its_figure(both: list[tuple[bool, bool]]) -> None:
    pairs = pairs_of(both)
    low, high = pairs.share_interval
    assert 0 <= low < high <= 1
    assert low - 1e-12 <= pairs.share <= high + 1e-12
    low, high = pairs.difference_interval
    assert -1 <= low < high <= 1
    if abs(pairs.difference) < 1:
        assert low <= pairs.difference <= high


@given(answers, st.integers(2, 20))
def test_more_of_the_same_answers_narrow_the_intervals(
    both: list[tuple[bool, bool]], times: int
) -> None:
    few, many = pairs_of(both), pairs_of(both * times)
    for name in ("share_interval", "difference_interval"):
        (low, high), (lower, higher) = getattr(many, name), getattr(few, name)
        assert high - low < higher - lower


def test_published_intervals_are_reproduced() -> None:
    """Newcombe (1998): 81 of 263; Bonett and Price (2012) by their formula: 1 lost and 9 won."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = bonett_price(1, 9, 100)
    middle, margin = 8 / 102, 1.959964 * ((12 / 102 - (8 / 102) ** 2) / 102) ** 0.5
    assert (low, high) == pytest.approx((middle - margin, middle + margin))


def test_the_interval_of_a_difference_contains_the_truth_in_95_of_100_draws() -> None:
    rng, lose, win, inside = random.Random(5), 0.04, 0.02, 0
    for _ in range(1000):
        drawn = [rng.random() for _ in range(200)]
        lost = sum(one < lose for one in drawn)
        won = sum(lose <= one < lose + win for one in drawn)
        low, high = bonett_price(lost, won, 200)
        inside += low <= win - lose <= high
    assert 930 <= inside <= 985


def test_no_question_or_another_number_of_questions_is_an_error() -> None:
    with pytest.raises(ValueError, match="no question"):
        Paired.of([], [])
    with pytest.raises(ValueError, match="shorter"):
        Paired.of([True, False], [True])
