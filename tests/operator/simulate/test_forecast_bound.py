"""Knowing the load beforehand is never worse: the measure of what start-up times cost."""

import pytest
from autoscaler.forecast_bound import Forecast, ForecastBound

from vlm_cli.simulator.generate import generate
from vlm_cli.simulator.run import Run, simulate
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.score import missed_minutes
from vlm_operator.names import POOL_ROLES

SEED = 8
TRACE = generate("long-answers", seed=SEED, seconds=900.0)


def play(forecast: Forecast) -> Run:
    setup = standard()
    bound = ForecastBound(setup.policy, setup.hardware, forecast, trace=TRACE, seed=SEED)
    return simulate(setup, TRACE, bound, seed=1)


@pytest.fixture(scope="module")
def runs():
    return {forecast: play(forecast) for forecast in Forecast}


def test_who_knows_more_misses_no_more_and_never_has_less(runs):
    targets = standard().policy.ttft_seconds
    missed = {forecast: len(missed_minutes(run.jobs, targets)) for forecast, run in runs.items()}
    assert missed[Forecast.KNOWS] <= missed[Forecast.BEGUN] <= missed[Forecast.SEES]
    assert missed[Forecast.SEES] > 0, "the rise outruns a start"
    for one, other in ((Forecast.KNOWS, Forecast.BEGUN), (Forecast.BEGUN, Forecast.SEES)):
        for more, less in zip(runs[one].moments, runs[other].moments, strict=False):
            assert all(more.wanted[role] >= less.wanted[role] for role in POOL_ROLES)


def test_before_a_rise_begins_only_foresight_orders(runs):
    first = {
        forecast: next(at.at for at in run.moments if at.wanted != run.moments[0].wanted)
        for forecast, run in runs.items()
    }
    assert first[Forecast.KNOWS] < first[Forecast.BEGUN] < first[Forecast.SEES]
