"""What the simulated service does to an autoscaler: wrong predictions, lost nodes, lost reports."""

import dataclasses
import itertools

import pytest
from autoscaler.perturb import OUTAGES, PERTURBED

from support.simulated import one_of_each, poisson, run
from vlm_cli.simulator.contenders import TriptychAutoscaler
from vlm_cli.simulator.generate import generate
from vlm_cli.simulator.hardware import QUIET, Noise
from vlm_cli.simulator.run import Run, Setup
from vlm_cli.simulator.scenario import standard
from vlm_operator.names import Role


def with_noise(setup: Setup, **noise) -> Setup:
    return dataclasses.replace(setup, noise=dataclasses.replace(QUIET, **noise))


def played(setup: Setup, *, shape: str = "diurnal", seed: int = 4, seconds: float = 900.0) -> Run:
    trace = generate(shape, seed=seed, seconds=seconds)
    return run(setup, trace, TriptychAutoscaler(setup.policy), seed=seed)


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
        done = run(setup, trace, TriptychAutoscaler(setup.policy, watch=watch), seed=4)
        learnt = int(200 / setup.policy.interval_seconds)
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


def test_a_pod_that_crashes_gives_up_its_work_and_comes_back_and_no_request_is_lost():
    crashes = ((300.0, Role.PREFILL), (300.0, Role.DECODE), (300.0, Role.ENCODER))
    setup = dataclasses.replace(standard(), noise=QUIET, crashes=crashes)
    done = run(setup, generate("steady", seed=3, seconds=600.0), seed=3)
    for role in Role.PREFILL, Role.DECODE, Role.ENCODER:
        taking = [moment.accepting[role] for moment in done.moments if moment.at <= 600.0]
        assert (taking[0], min(taking), taking[-1]) == (2, 1, 2)
    for job in done.jobs:
        assert job.ended_at is not None
        assert job.delivered == job.request.output_tokens


def test_one_crash_of_a_healthy_pod_does_not_keep_its_pool_from_growing():
    found = PERTURBED["a healthy prefill pod crashes"]()
    assert found.crashes
    setup = dataclasses.replace(found, noise=QUIET, crashes=((200.0, Role.PREFILL),))
    done = run(
        setup, generate("diurnal", seed=4, seconds=900.0), TriptychAutoscaler(setup.policy), seed=4
    )
    after = [moment.wanted[Role.PREFILL] for moment in done.moments if 200.0 < moment.at <= 900.0]
    assert max(after) > after[0]


def test_while_nodes_are_gone_no_pod_starts_and_those_that_wait_start_when_they_return():
    setup = PERTURBED["no nodes for an hour"]()
    kinds = {
        role: {
            name: dataclasses.replace(kind, gone_from=0.0, gone_until=400.0)
            for name, kind in found.items()
        }
        for role, found in setup.hardware.node_types.items()
    }
    hardware = dataclasses.replace(setup.hardware, node_types=kinds)
    setup = dataclasses.replace(setup, hardware=hardware, noise=QUIET)
    done = run(
        setup,
        generate("steady", seed=4, seconds=600.0, scale=1.5),
        TriptychAutoscaler(setup.policy),
        seed=4,
    )
    until = [moment.accelerators for moment in done.moments if moment.at < 400.0]
    after = [moment.accelerators for moment in done.moments if 405.0 < moment.at <= 600.0]
    assert max(until) == 6
    assert max(after) > 6
    assert all(job.ended_at is not None for job in done.jobs)


def test_an_outage_takes_the_nodes_of_every_pool_for_an_hour_from_the_time_in_its_name_on():
    for name, make in OUTAGES.items():
        setup = make()
        assert setup.hardware.node_types.keys() == setup.policy.pools.keys()
        for kinds in setup.hardware.node_types.values():
            for kind in kinds.values():
                assert name == f"no nodes from {kind.gone_from:.0f} s"
                assert kind.gone_until - kind.gone_from == 3600.0


class Counting:
    """Notes what one role reports at each tick."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.admitted: list[float] = []
        self.queued: list[float] = []

    def decide(self, reading):
        own = [item for item in reading.view.samples.values() if item.role is self._role]
        self.admitted.append(sum(item.started_work_seconds for item in own))
        self.queued.append(sum(item.queued_work_seconds for item in own))
        return {}


def test_work_is_admitted_when_it_begins_and_queued_before_as_workers_count():
    """One pod that gets twice as much as it can do begins no more than a second a second."""
    setup = one_of_each(kv_tokens=10_000_000)
    counting = Counting(Role.PREFILL)
    run(setup, poisson(20.0, 120.0, tokens=280.0, output_tokens=4), counting)
    ticks = int(120 / setup.policy.interval_seconds)
    seconds = setup.policy.interval_seconds
    begun = [after - before for before, after in itertools.pairwise(counting.admitted[:ticks])]
    assert max(begun) <= seconds + 2.0, "a step and a prompt beyond the tick at most"
    assert sum(begun) / (seconds * len(begun)) == pytest.approx(1.0, rel=0.1)
    assert counting.queued[ticks - 1] > 60.0
    assert counting.queued[-1] == pytest.approx(0.0, abs=1e-6), "all of it is begun in the end"


def test_starts_take_between_half_and_twice_their_median():
    setup = dataclasses.replace(standard(), noise=Noise())
    trace = generate("square", seed=2, seconds=600.0)
    seen: dict[str, float] = {}

    class Watching(TriptychAutoscaler):
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
