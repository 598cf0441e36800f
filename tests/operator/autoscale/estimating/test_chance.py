"""What is chance is no load: requests come in bunches, and a pool answers only to more of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.estimates import Service, busy, policy
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.demand import NOISE, planned
from vlm_operator.names import Role


@given(
    load=st.floats(0.1, 1e6),
    slope=st.floats(-1e3, 1e3),
    chance=st.floats(0.0, 1e6),
    startup=st.floats(1.0, 600.0),
)
def test_a_rise_is_planned_for_as_far_as_it_is_more_than_chance(load, slope, chance, startup):
    points = [(float(second), load + slope * second) for second in range(0, 60, 5)]

    def ahead(allowed: float) -> float:
        return planned(policy(), load, points, startup=startup, chance=allowed)

    assert load <= ahead(chance) <= ahead(0.0) <= load * (1 + Constants().growth_cap) * (1 + 1e-9)
    if slope * startup <= chance:
        assert ahead(chance) == pytest.approx(load)


@given(seed=st.integers(0, 10_000), pods=st.integers(2, 6))
def test_kv_that_swings_by_chance_alone_asks_for_no_pod(seed, pods):
    """Two thirds of what is full, and as many requests more or less as chance makes of it."""
    service = Service(policy(decode={"kv_occupancy": 0.8}), decode=pods)
    mean, each, swing = 6_000.0 * pods, 500, 0.0
    for tick in range(40):
        swing = NOISE * math.sqrt(each * mean) * math.sin(seed + 2.5 * tick)
        for pod in service.of(Role.DECODE):
            pod.tokens = round((mean + swing) / pods)
            pod.inflight = round(pod.tokens / each)
        found = service.tick()
    need = found.needs[Role.DECODE]
    assert need.units <= pods
    assert not need.bottleneck


def test_an_overrun_that_is_over_makes_nothing_grow():
    service = Service(policy(), prefill=2)
    busy(service, Role.PREFILL, 0.3)
    for pod in service.of(Role.PREFILL):
        pod.queued = 2.0
    service.tick(3)
    service.finish("text", 60, prefill_queue=4.0, prefill=0.3)
    assert service.tick().needs[Role.PREFILL].bottleneck
    for _ in range(14):  # 70 s in which all meet the target; the window still shows the others
        service.finish("text", 10, prefill=0.3)
        found = service.tick()
    (text,) = [item for item in found.attributions if item.modality == "text"]
    assert text.overrun_seconds > 0
    assert not text.exceeds()
    assert not found.needs[Role.PREFILL].bottleneck


def test_a_backlog_that_is_being_worked_off_asks_for_no_further_pod():
    service = Service(policy(), prefill=2)
    busy(service, Role.PREFILL, 0.3)
    asked = []
    for queued in [*range(0, 12, 2), *range(12, 0, -2)]:
        for pod in service.of(Role.PREFILL):
            pod.queued = float(queued)
        service.finish("text", 20, prefill_queue=4.0, prefill=0.3)
        found = service.tick()
        asked.append(any(item.signal == "overrun" for item in found.needs[Role.PREFILL].candidates))
    assert asked[5], "it piles up"
    assert not asked[-1], "it is nearly done"
