"""The baselines do what their originals do."""

import pytest
from autoscaler.compare import grid

from support.simulated import run
from vlm_cli.simulator.baselines import BASELINES, baseline
from vlm_cli.simulator.contenders import OURS
from vlm_cli.simulator.generate import generate
from vlm_cli.simulator.horizontal import HPA, by_pods, by_total
from vlm_cli.simulator.scenario import standard
from vlm_operator.autoscale.view import PodView, PoolView
from vlm_operator.names import Role

POLICY = standard().policy.pools[Role.DECODE]


def pool(ready: int, starting: int = 0) -> PoolView:
    pods = [PodView(f"r{index}", "big", "ready", 0.0, 0.0) for index in range(ready)]
    pods += [PodView(f"s{index}", "big", "starting", 0.0) for index in range(starting)]
    return PoolView(ready + starting, None, {}, tuple(pods))


def test_everybody_is_tuned_over_as_many_points():
    assert len({len(grid(name)) for name in (OURS, *BASELINES)}) == 1


def test_an_external_metric_is_divided_by_its_target_beyond_a_tolerance():
    assert by_total(43.0, 10.0, 4) == 4, "7.5 % is tolerated"
    assert by_total(45.0, 10.0, 4) == 5
    assert by_total(20.0, 10.0, 4) == 2


def test_a_pod_metric_is_a_mean_and_starting_pods_count_as_idle():
    assert by_pods({"r0": 30.0, "r1": 10.0}, 10.0, pool(2), 2) == 4
    assert by_pods({"r0": 30.0, "r1": 10.0}, 10.0, pool(2, starting=1), 3) == 4
    assert by_pods({"r0": 15.0}, 10.0, pool(1, starting=1), 2) == 2, "the turn is not made"


def test_a_pod_without_a_metric_counts_against_the_move():
    assert by_pods({"r0": 2.0}, 10.0, pool(2), 2) == 2, "as the target when shrinking"
    assert by_pods({"r0": 2.0, "r1": 2.0}, 10.0, pool(2), 2) == 1
    assert by_pods({}, 10.0, pool(2), 2) == 2


def test_an_hpa_grows_by_four_pods_or_by_all_and_shrinks_to_the_window_s_greatest():
    hpa = HPA(POLICY)
    assert hpa.stabilize(0.0, 2, 10) == 6
    assert hpa.stabilize(15.0, 6, 10) == 10
    assert hpa.stabilize(30.0, 10, 3) == 10
    assert hpa.stabilize(200.0, 10, 4) == 10
    assert hpa.stabilize(316.0, 10, 3) == 4


def test_an_hpa_begins_with_what_there_is():
    assert HPA(POLICY).stabilize(0.0, 5, 1) == 5


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_baseline_grows_under_load_and_shrinks_after_it(name):
    setup = standard()
    done = run(
        setup, generate("bad-node-type", seed=1, seconds=1500.0), baseline(name, setup.policy, {})
    )
    totals = [sum(moment.wanted.values()) for moment in done.moments]
    assert max(totals) > totals[0]
    assert totals[-1] < max(totals)
    assert all(job.ended_at is not None for job in done.jobs)
    least = {
        role: min(moment.wanted[role] for moment in done.moments)
        for role in Role
        if role != "gateway"
    }
    assert min(least.values()) >= 1
