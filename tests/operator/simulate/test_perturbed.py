"""What the simulated service does to an autoscaler: wrong predictions, lost nodes, lost reports."""

import dataclasses
import itertools

import pytest
from operator_simulate import one_of_each, poisson, run

from vlm_operator.names import Role
from vlm_operator.simulate.generate import generate
from vlm_operator.simulate.noise import QUIET, Noise
from vlm_operator.simulate.ours import Ours
from vlm_operator.simulate.run import Run, Setup
from vlm_operator.simulate.scenario import standard


def with_noise(setup: Setup, **noise) -> Setup:
    return dataclasses.replace(setup, noise=dataclasses.replace(QUIET, **noise))


def played(setup: Setup, *, shape: str = "diurnal", seed: int = 4, seconds: float = 900.0) -> Run:
    trace = generate(shape, seed=seed, seconds=seconds)
    return run(setup, trace, Ours(setup.policy), seed=seed)


def wanted(done: Run, role: Role) -> list[int]:
    return [moment.wanted[role] for moment in done.moments if moment.at <= done.seconds]


@pytest.mark.parametrize("bias", [1 / 1.5, 1.5])
def test_needs_follow_what_work_took_and_not_what_pods_predicted(bias):
    loads, most = [], []
    for factor in (1.0, bias):
        setup = with_noise(standard(), bias=factor)
        seen: dict[Role, list[float]] = {Role.ENCODER: [], Role.PREFILL: []}

        def watch(_view, _memory, outcome, seen=seen):
            for role, found in seen.items():
                found.append(outcome.estimate.demands[role].erlangs)

        trace = generate("steady", seed=4, seconds=600.0)
        done = run(setup, trace, Ours(setup.policy, watch=watch), seed=4)
        learnt = int(200 / setup.policy.tick_seconds)
        loads.append([sum(found[learnt:]) / len(found[learnt:]) for found in seen.values()])
        most.append([max(wanted(done, role)) for role in seen])
    assert loads[1] == pytest.approx(loads[0], rel=0.2)
    assert most[1] == pytest.approx(most[0], abs=1), "no runaway"


def test_a_node_type_without_nodes_loses_no_request_and_runs_away_with_no_pool():
    done = played(standard("bad-node-type"), shape="bad-node-type")
    assert all(job.ended_at is not None and not job.refused for job in done.jobs)
    assert max(moment.accelerators for moment in done.moments) <= 16
    assert max(sum(moment.wanted.values()) for moment in done.moments) <= 16


def test_without_any_report_nothing_changes():
    done = played(with_noise(standard(), loss=1.0), seconds=600.0)
    for role in Role.ENCODER, Role.PREFILL, Role.DECODE:
        assert set(wanted(done, role)) == {2}


def test_reports_that_are_lost_now_and_then_cost_no_request():
    done = played(with_noise(standard(), loss=0.3), seconds=600.0)
    assert all(job.ended_at is not None and not job.refused for job in done.jobs)
    assert max(moment.accelerators for moment in done.moments) <= 16


class Counting:
    """Notes what one role reports at each tick."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.admitted: list[float] = []
        self.queued: list[float] = []

    def decide(self, reading):
        own = [item for item in reading.view.samples.values() if item.role is self._role]
        self.admitted.append(sum(item.admitted_work_seconds for item in own))
        self.queued.append(sum(item.queued_work_seconds for item in own))
        return {}


def test_work_is_admitted_when_it_begins_and_queued_before_as_workers_count():
    """One pod that gets twice as much as it can do begins no more than a second a second."""
    setup = one_of_each(kv_tokens=10_000_000)
    counting = Counting(Role.PREFILL)
    run(setup, poisson(20.0, 120.0, tokens=280.0, output_tokens=4), counting)
    ticks = int(120 / setup.policy.tick_seconds)
    seconds = setup.policy.tick_seconds
    begun = [after - before for before, after in itertools.pairwise(counting.admitted[:ticks])]
    assert max(begun) <= seconds + 2.0, "a step and a prompt beyond the tick at most"
    assert sum(begun) / (seconds * len(begun)) == pytest.approx(1.0, rel=0.1)
    assert counting.queued[ticks - 1] > 60.0
    assert counting.queued[-1] == pytest.approx(0.0, abs=1e-6), "all of it is begun in the end"


def test_starts_take_between_half_and_twice_their_median():
    setup = dataclasses.replace(standard(), noise=Noise())
    trace = generate("square", seed=2, seconds=600.0)
    seen: dict[str, float] = {}

    class Watching(Ours):
        def decide(self, reading):
            for pool in reading.view.pools.values():
                for pod in pool.pods:
                    if pod.ready_since is not None and pod.scheduled_since is not None:
                        seen[pod.uid] = pod.ready_since - pod.scheduled_since
            return super().decide(reading)

    run(setup, trace, Watching(setup.policy))
    started = [took for took in seen.values() if took > 0]
    assert len(started) >= 3
    assert all(30.0 <= took <= 120.0 for took in started)
    assert max(started) - min(started) > 5.0
