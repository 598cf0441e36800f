"""Needs follow what work took, whatever the pods predicted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.estimates import Service, busy, policy
from vlm_operator.autoscale.readings import MAX_RATIO, MIN_RATIO, Measured
from vlm_operator.names import Role

KIND = {Role.ENCODER: "encode", Role.PREFILL: "prefill"}


def lived(role: Role, *, factor: float, rate: float, queued: float, ticks: int = 120):
    """A pool whose pods take `factor` times as long as they predict."""
    service = Service(policy(), encoder=2, prefill=2)
    busy(service, role, rate)
    for _ in range(ticks):
        for pod in service.of(role):
            pod.queued = queued
            seconds = rate * factor * service.policy.interval_seconds
            pod.work(KIND[role], seconds=seconds, calls=1, items=1, units=100)
        found = service.tick()
    return found.demands[role], service.memory.measured[f"{role}/plain"].ratio


@given(
    role=st.sampled_from(sorted(KIND)),
    factor=st.floats(0.6, 2.5),
    rate=st.floats(0.2, 1.0),
    queued=st.floats(0.0, 10.0),
)
@settings(max_examples=15)
def test_demand_is_in_seconds_that_work_took(role, factor, rate, queued):
    demand, ratio = lived(role, factor=factor, rate=rate, queued=queued)
    assert ratio == pytest.approx(factor, rel=0.2)
    assert demand.erlangs == pytest.approx(2 * rate * factor, rel=0.2)
    assert demand.queued_seconds == pytest.approx(2 * queued * ratio, rel=0.01)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_no_measurement_multiplies_a_need_beyond_its_bounds(taken, admitted):
    assert MIN_RATIO <= Measured(0.0, taken, admitted).ratio <= MAX_RATIO


def test_pods_that_do_not_report_how_long_they_were_busy_are_believed():
    service = Service(policy(), prefill=2)
    busy(service, Role.PREFILL, 0.5)
    found = service.tick(60)
    assert found.demands[Role.PREFILL].erlangs == pytest.approx(1.0)


def test_work_that_waits_has_come_though_it_has_not_begun():
    """A pod that is full begins one second a second; its queue grows by what else comes."""
    service = Service(policy(), prefill=1)
    busy(service, Role.PREFILL, 1.0)
    for _ in range(60):
        for pod in service.of(Role.PREFILL):
            pod.queued += 1.5 * service.policy.interval_seconds
        found = service.tick()
    assert found.demands[Role.PREFILL].erlangs == pytest.approx(2.5, rel=0.05)
