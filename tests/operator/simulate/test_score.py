"""What a run was worth."""

import math

import pytest

from support.simulated import one_of_each, poisson, run
from vlm_cli.simulator.job import Job
from vlm_cli.simulator.run import Moment
from vlm_cli.simulator.score import (
    direction_changes,
    front,
    missed_minutes,
    most_within,
    percentile,
    score,
)
from vlm_cli.simulator.trace import Request
from vlm_operator.names import Role


def job(at: float, ttft: float | None, *, image: bool = False) -> Job:
    made = Job(Request(at, 10, 10, (256,) if image else ()), visual_tokens=0)
    made.first_token_at = None if ttft is None else at + ttft
    return made


def moments(*counts: int) -> list[Moment]:
    return [
        Moment(60.0 * index, {Role.DECODE: count}, {}, count, float(count), 0)
        for index, count in enumerate(counts)
    ]


def test_a_minute_is_missed_by_the_95th_percentile_of_one_modality():
    targets = {"text": 1.0, "image": 2.0}
    quick = [job(second, 0.5) for second in range(19)]
    assert missed_minutes([*quick, job(30, 9.0)], targets) == set(), "1 of 20"
    assert missed_minutes([*quick, job(30, 9.0), job(31, 9.0)], targets) == {0}
    assert missed_minutes([*quick, job(30, 2.5, image=True)], targets) == {0}
    assert missed_minutes([*quick, job(30, 1.5, image=True)], targets) == set()


def test_a_request_without_a_first_token_misses_its_minute():
    assert missed_minutes([job(65, None)], {"text": 1.0}) == {1}


def test_a_modality_without_a_target_misses_nothing():
    assert missed_minutes([job(1, 100.0)], {"image": 1.0}) == set()


def test_a_percentile_is_the_nearest_rank():
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7.0], 0.95) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_direction_changes_are_turns_not_steps():
    assert direction_changes(moments(1, 2, 3, 3, 4), Role.DECODE) == ()
    assert direction_changes(moments(1, 2, 2, 1, 0, 3), Role.DECODE) == (180.0, 300.0)
    assert most_within((180.0, 300.0), 121.0) == 2
    assert most_within((180.0, 300.0), 120.0) == 1
    assert most_within((), 60.0) == 0


def test_the_front_has_the_runs_that_no_other_beats_in_both():
    points = {"a": (1.0, 9.0), "b": (2.0, 5.0), "c": (3.0, 6.0), "d": (4.0, 4.0)}
    assert front(points) == ["a", "b", "d"]


def test_three_pods_for_ten_minutes_are_half_a_device_hour():
    setup = one_of_each()
    found = score(run(setup, poisson(0.5, 600.0, output_tokens=20)), setup.policy)
    # the last tick's state holds beyond the trace
    assert found.accelerator_hours == pytest.approx(3 * 600 / 3600, rel=0.02)
    assert found.cost == pytest.approx(4.0 * found.accelerator_hours)
    assert found.cost_per_1000 == pytest.approx(1000 * found.cost / found.requests)
    assert (found.missed, found.minutes, found.turns, found.unserved) == (0, 10, 0, 0)
