"""What holds in every run, whatever the autoscaler does."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulated import Restless, one_of_each, poisson, quick_start, run, with_budget
from vlm_cli.simulator.contenders import TriptychAutoscaler
from vlm_cli.simulator.generate import SHAPES, generate
from vlm_cli.simulator.hardware import QUIET, Noise
from vlm_cli.simulator.pool import Drains
from vlm_cli.simulator.scenario import standard

SEEDS = st.integers(min_value=0, max_value=10_000)


@settings(max_examples=12)
@given(seed=SEEDS, shape=st.sampled_from(sorted(SHAPES)), drain=st.sampled_from([5.0, 600.0]))
def test_every_request_ends_exactly_once_with_all_of_its_tokens(seed, shape, drain):
    setup = dataclasses.replace(quick_start(standard(shape), 20.0), drains=Drains(drain))
    trace = generate(shape, seed=seed, seconds=120.0)
    done = run(setup, trace, Restless(setup, seed), seed=seed)
    assert [job.request for job in done.jobs] == list(trace.requests)
    for job in done.jobs:
        assert job.ended_at is not None
        assert job.delivered == job.request.output_tokens
        assert job.request.at < job.first_token_at <= job.ended_at


@settings(max_examples=12)
@given(seed=SEEDS, budget=st.integers(min_value=6, max_value=12))
def test_pods_on_nodes_stay_within_the_budget_at_every_moment(seed, budget):
    setup = with_budget(quick_start(standard(), 20.0), budget)
    done = run(setup, generate("diurnal", seed=seed, seconds=120.0), Restless(setup, seed))
    assert max(moment.accelerators for moment in done.moments) <= budget
    assert max(sum(moment.wanted.values()) for moment in done.moments) > budget, "it was tried"


def test_stages_add_up_to_the_time_to_first_token():
    done = run(standard(), generate("bursty-images", seed=3, seconds=300.0))
    assert len(done.jobs) > 1000
    for job in done.jobs:
        assert sum(job.stages.values()) == pytest.approx(job.ttft)
        assert min(job.stages.values()) >= 0


def test_kv_tokens_in_use_return_to_zero():
    last = {}

    class Watching:
        def decide(self, reading):
            last.update(
                {uid: item.kv for uid, item in reading.view.samples.items() if item.kv is not None}
            )
            return {}

    setup = one_of_each(kv_tokens=4000)
    done = run(setup, poisson(2.0, 120.0, output_tokens=80), Watching())
    assert all(job.ended_at for job in done.jobs)
    assert [(kv.running, kv.reserved, kv.queued) for kv in last.values()] == [(0, 0, 0)] * 2


def test_a_cache_too_small_preempts_and_every_answer_still_ends():
    setup = one_of_each(kv_tokens=1500, kv_margin=0.0)
    done = run(setup, poisson(3.0, 60.0, tokens=100, output_tokens=200))
    again = [job for job in done.jobs if job.ended_at - job.first_token_at > 30]
    assert again, "some waited for blocks"
    assert all(job.delivered == 200 for job in done.jobs)


@pytest.mark.parametrize("noise", [QUIET, Noise(), Noise(loss=0.1, jitter=0.2)])
def test_the_same_seed_gives_the_same_run(noise):
    setup = dataclasses.replace(standard(), noise=noise)
    trace = generate("long-prompts", seed=5, seconds=300.0)
    runs = [run(setup, trace, TriptychAutoscaler(setup.policy), seed=9) for _ in range(2)]
    first, second = ([(job.first_token_at, job.ended_at) for job in done.jobs] for done in runs)
    assert first == second
    assert runs[0].moments == runs[1].moments
    other = run(
        setup,
        generate("long-prompts", seed=6, seconds=300.0),
        TriptychAutoscaler(setup.policy),
        seed=9,
    )
    assert other.moments != runs[0].moments


def test_our_own_numbers_never_ask_for_more_than_the_budget():
    setup = with_budget(standard(), 8)
    done = run(
        setup,
        generate("diurnal", seed=2, seconds=900.0, scale=2.0),
        TriptychAutoscaler(setup.policy),
    )
    assert max(sum(moment.wanted.values()) for moment in done.moments) == 8
    assert max(moment.accelerators for moment in done.moments) <= 8
