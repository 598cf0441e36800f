"""A simulated service that goes to zero: no request is lost, and nothing runs while none comes."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulated import quick_start, run, with_budget
from vlm_cli.simulator.contenders import TriptychAutoscaler
from vlm_cli.simulator.hardware import QUIET, Noise
from vlm_cli.simulator.pool import Drains
from vlm_cli.simulator.run import Run, Setup
from vlm_cli.simulator.scenario import standard
from vlm_cli.simulator.trace import Request, Trace
from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.policy import SleepPolicy, ZeroPolicy
from vlm_operator.names import Role

START = 20.0  # seconds of a pod


def sleeper(idle: float = 60.0, *, at_zero: WhileAtZero | None = None, noise=QUIET) -> Setup:
    """Three pools that sleep after `idle` seconds; with `at_zero` the encoder may sleep alone."""
    setup = quick_start(standard(), START)
    pools = {
        role: dataclasses.replace(
            pool, variants=(dataclasses.replace(pool.variants[0], startup_seconds=START),)
        )
        for role, pool in setup.policy.pools.items()
    }
    if at_zero is not None:
        zero = ZeroPolicy(30.0, at_zero)
        pools[Role.ENCODER] = dataclasses.replace(pools[Role.ENCODER], minimum=0, zero=zero)
    policy = dataclasses.replace(setup.policy, pools=pools, sleep=SleepPolicy(idle))
    return dataclasses.replace(setup, policy=policy, noise=noise, start=dict.fromkeys(pools, 1))


def bursts(seed: int, *, images: float = 0.5, last: float = 600.0) -> Trace:
    """Some requests now and then, with nothing for a while in between."""
    rng, found, at = random.Random(seed), [], 0.0
    while True:
        at += rng.choice([0.2, 1.0, 30.0, 70.0, 200.0])
        if at >= last:
            return Trace("bursts", last, tuple(found))
        patches = (2000,) if rng.random() < images else ()
        found.append(Request(at, 300, 40, patches))


def simulated(setup: Setup, trace: Trace, seed: int = 0) -> Run:
    return run(setup, trace, TriptychAutoscaler(setup.policy), seed=seed)


def asleep(done: Run) -> list[bool]:
    return [not any(item.wanted.values()) for item in done.moments]


def test_a_service_sleeps_between_two_bursts_and_every_answer_comes():
    trace = Trace("two", 600.0, tuple(Request(at, 300, 40) for at in (1.0, 2.0, 400.0, 401.0)))
    done = simulated(sleeper(), trace)
    zero = [item for item in done.moments if not any(item.accepting.values()) and item.at < 400]
    assert len(zero) > 200, "it was looked at each second"
    assert {item.accelerators for item in zero[10:]} == {0}
    assert [job.delivered for job in done.jobs] == [40] * 4
    warm, cold = done.jobs[0], done.jobs[2]
    assert cold.wake_seconds == pytest.approx(START + 6.0, abs=2.0), "a tick, a node, a start"
    assert warm.wake_seconds == 0
    assert sum(cold.stages.values()) == pytest.approx(cold.ttft - cold.wake_seconds)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000),
    idle=st.sampled_from([10.0, 60.0]),
    at_zero=st.sampled_from([None, WhileAtZero.QUEUE, WhileAtZero.INLINE_AT_PREFILL]),
    noise=st.sampled_from([QUIET, Noise(), Noise(loss=0.2)]),
    drain=st.sampled_from([5.0, 600.0]),
)
def test_no_request_is_lost_because_of_a_sleep(seed, idle, at_zero, noise, drain):
    setup = dataclasses.replace(
        sleeper(idle, at_zero=at_zero, noise=noise), drains=Drains(drain, at_once=16)
    )
    trace = bursts(seed)
    done = simulated(setup, trace, seed)
    assert [job.request for job in done.jobs] == list(trace.requests)
    for job in done.jobs:
        assert not job.refused
        assert job.delivered == job.request.output_tokens
        assert job.wake_seconds < 4 * START


def test_the_made_up_bursts_make_it_sleep_and_wake():
    runs = [simulated(sleeper(10.0), bursts(seed)) for seed in range(8)]
    assert sum(any(asleep(done)) for done in runs) >= 6
    assert sum(job.wake_seconds > 0 for done in runs for job in done.jobs) >= 8


def test_a_budget_that_holds_one_pod_of_each_is_enough_to_wake():
    done = simulated(with_budget(sleeper(10.0), 3), bursts(4))
    assert any(asleep(done))
    assert max(item.accelerators for item in done.moments) <= 3
    assert all(job.ended_at is not None for job in done.jobs)


def test_a_service_that_refuses_images_at_zero_holds_them_while_it_wakes():
    trace = Trace("one", 400.0, (Request(1.0, 300, 40), Request(300.0, 300, 40, (2000,))))
    done = simulated(sleeper(60.0, at_zero=WhileAtZero.REJECT), trace)
    assert done.jobs[1].wake_seconds > 0
    assert not done.jobs[1].refused
