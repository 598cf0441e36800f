"""Knowing the load beforehand is never worse: the measure of what start-up times cost."""

import pytest

from vlm_operator.names import POOL_ROLES
from vlm_operator.simulate.foresight import Foresight, Sight
from vlm_operator.simulate.generate import generate
from vlm_operator.simulate.run import Run, simulate
from vlm_operator.simulate.scenario import standard
from vlm_operator.simulate.score import missed_minutes

SEED = 8
TRACE = generate("long-answers", seed=SEED, seconds=900.0)


def play(sight: Sight) -> Run:
    setup = standard()
    foresight = Foresight(setup.policy, setup.plant, sight, trace=TRACE, seed=SEED)
    return simulate(setup, TRACE, foresight, seed=1)


@pytest.fixture(scope="module")
def runs():
    return {sight: play(sight) for sight in Sight}


def test_who_knows_more_misses_no_more_and_never_has_less(runs):
    targets = standard().policy.ttft_seconds
    missed = {sight: len(missed_minutes(run.jobs, targets)) for sight, run in runs.items()}
    assert missed[Sight.KNOWS] <= missed[Sight.BEGUN] <= missed[Sight.SEES]
    assert missed[Sight.SEES] > 0, "the rise outruns a start"
    for one, other in ((Sight.KNOWS, Sight.BEGUN), (Sight.BEGUN, Sight.SEES)):
        for more, less in zip(runs[one].moments, runs[other].moments, strict=False):
            assert all(more.wanted[role] >= less.wanted[role] for role in POOL_ROLES)


def test_before_a_rise_begins_only_foresight_orders(runs):
    first = {
        sight: next(at.at for at in run.moments if at.wanted != run.moments[0].wanted)
        for sight, run in runs.items()
    }
    assert first[Sight.KNOWS] < first[Sight.BEGUN] < first[Sight.SEES]
