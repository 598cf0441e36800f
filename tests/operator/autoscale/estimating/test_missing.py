"""Missing and strange data, row by row of the design's table: none of it shrinks anything."""

import dataclasses

import pytest

from support.estimates import TICK, Pod, Service, busy, policy
from vlm_operator.autoscale.estimate import EstimateMemory, estimate
from vlm_operator.names import Role


def test_no_traffic_is_idle_and_not_missing():
    service = Service(policy(), prefill=2)
    found = service.tick(int(300 / TICK) + 1)
    assert found.fresh
    assert found.attributions == ()
    need = found.needs[Role.PREFILL]
    assert (need.idle, need.known, need.units, need.least_units) == (True, True, 0, 0)


def test_too_few_answers_hold_the_pool_and_are_timed():
    service = Service(policy(), prefill=3)
    service.tick(2)
    for pod in service.of(Role.PREFILL)[:2]:
        pod.answers = False
    found = service.tick(4)
    assert not found.needs[Role.PREFILL].known
    assert found.needs[Role.DECODE].known
    assert not found.fresh
    assert found.missing_seconds == 3 * TICK
    assert "1 of 3 ready pods answered" in found.needs[Role.PREFILL].message
    for pod in service.pods:
        pod.answers = True
    found = service.tick()
    assert found.fresh
    assert found.missing_seconds == 0


def test_a_pod_that_is_silent_for_a_moment_keeps_its_load():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.5)
    before = service.tick(40).needs[Role.PREFILL]
    service.of(Role.PREFILL)[0].answers = False
    during = service.tick(3).needs[Role.PREFILL]
    assert during.known
    assert during.least_units == pytest.approx(before.least_units)


def test_a_pod_that_is_silent_for_long_is_no_capacity_and_is_not_taken_for_idle():
    service = Service(policy(), prefill=4)
    busy(service, Role.PREFILL, 0.5)
    before = service.tick(40).needs[Role.PREFILL]
    service.of(Role.PREFILL)[0].answers = False
    after = service.tick(60).needs[Role.PREFILL]
    assert after.known
    assert after.least_units == pytest.approx(1.5 / 0.7 + 1, rel=0.01)
    assert after.least_units >= before.least_units


def test_samples_of_pods_that_are_gone_are_not_looked_at():
    service = Service(policy(), decode=1)
    ghost = Pod("ghost", Role.DECODE, tokens=9_000)
    view = service.view()
    view = dataclasses.replace(view, samples={**view.samples, "ghost": ghost.sample()})
    found, memory = estimate(service.policy, view, EstimateMemory())
    assert found.demands[Role.DECODE].tokens == 0
    assert set(memory.answers) == {pod.uid for pod in service.pods}


def test_a_restarted_process_counts_from_zero_and_its_load_stays():
    service = Service(policy(), prefill=2)
    busy(service, Role.PREFILL, 0.6)
    before = service.tick(60).needs[Role.PREFILL]
    for pod in service.of(Role.PREFILL):
        pod.boot, pod.admitted = "b", 0.0
    after = service.tick().needs[Role.PREFILL]
    assert after.least_units == pytest.approx(before.least_units)


def test_a_pod_that_uses_more_kv_than_it_has_counts_as_silent_and_is_counted():
    service = Service(policy(), prefill=1)
    busy(service, Role.PREFILL, 0.5)
    before = service.tick(20)
    (pod,) = service.of(Role.PREFILL)
    pod.tokens = 3 * pod.capacity
    found = service.tick()
    assert len(found.absurd) == 1
    assert not found.needs[Role.PREFILL].known
    assert found.needs[Role.PREFILL].units >= before.needs[Role.PREFILL].units - 1e-9


def test_a_jump_that_no_process_can_make_is_absurd():
    service = Service(policy(), prefill=1)
    service.tick(5)
    (pod,) = service.of(Role.PREFILL)
    pod.admitted += 1e6
    assert len(service.tick().absurd) == 1


def test_a_clock_that_is_put_back_stops_nothing():
    service = Service(policy(), prefill=2)
    busy(service, Role.PREFILL, 0.6)
    service.tick(60)
    service.now -= 3600
    before = service.tick()
    assert before.needs[Role.PREFILL].units >= 0
    assert service.tick(60).needs[Role.PREFILL].known


def test_a_pool_whose_pods_report_no_capacity_is_held():
    service = Service(policy(), decode=1)
    service.of(Role.DECODE)[0].capacity = 0
    need = service.tick().needs[Role.DECODE]
    assert not need.known
    assert "no capacity" in need.message


def test_a_pool_without_a_ready_pod_is_held():
    service = Service(policy(), decode=1)
    service.of(Role.DECODE)[0].phase = "starting"
    assert not service.tick().needs[Role.DECODE].known
