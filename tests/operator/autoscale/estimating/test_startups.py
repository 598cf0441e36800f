"""Start-ups are measured, slopes must rise, and yesterday is a floor."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.estimates import NOW, PLAIN, Pod, Service, policy
from vlm_operator.autoscale.demand import planned, rising_slope
from vlm_operator.autoscale.startups import StartupMemory, percentile_90, time_startups
from vlm_operator.autoscale.view import PodView, PoolView, View
from vlm_operator.names import Role


def test_a_start_is_timed_from_creation_to_readiness_and_only_once():
    service = Service(policy(), decode=1)
    assert service.tick().startup[Role.DECODE, "plain"] == 180.0
    pod = Pod("new", Role.DECODE, phase="starting", created=service.now)
    service.pods.append(pod)
    service.tick(3)
    pod.phase = "ready"  # ready 60 s after its creation, says the pod
    assert service.tick().startup[Role.DECODE, "plain"] == 60.0
    assert service.tick(3).startup[Role.DECODE, "plain"] == 60.0
    assert service.memory.startups.seconds == {"decode/plain": (60.0,)}


def test_pods_that_were_ready_when_the_operator_came_say_nothing():
    service = Service(policy(), decode=3)
    service.tick(2)
    assert service.memory.startups.seconds == {}


def test_twenty_starts_are_kept_and_nine_of_ten_are_faster():
    service = Service(policy(), decode=1)
    for index in range(30):
        pod = Pod(f"new-{index}", Role.DECODE, phase="pending", created=service.now)
        service.pods.append(pod)
        service.tick()
        pod.phase = "ready"
        service.tick()
        service.pods.remove(pod)
    assert len(service.memory.startups.seconds["decode/plain"]) == 20
    assert percentile_90(range(1, 11)) == 9
    assert percentile_90([5.0]) == 5.0


def test_a_node_class_says_what_is_not_measured():
    variant = PLAIN.__class__("plain", startup_seconds=42.0)
    service = Service(policy(decode={"variants": (variant,)}))
    assert service.tick().startup[Role.DECODE, "plain"] == 42.0


@given(st.floats(0, 5), st.floats(0.001, 1), st.integers(6, 13))
def test_a_steady_rise_is_its_slope_and_a_fall_is_none(start, slope, count):
    points = [(10.0 * index, start + slope * 10 * index) for index in range(count)]
    assert rising_slope(points) == pytest.approx(slope)
    assert rising_slope([(at, -value) for at, value in points]) == 0


@given(st.lists(st.sampled_from([1.0, 1.1]), min_size=13, max_size=13))
def test_noise_around_a_level_foresees_little(values):
    points = [(10.0 * index, value) for index, value in enumerate(values)]
    assert rising_slope(points) <= 0.1 / 10


def test_growth_is_foreseen_up_to_the_cap():
    rising = [(10.0 * index, 1.0 + 0.1 * index) for index in range(13)]
    asked = policy()
    now = planned(asked, 2.2, rising, startup=60.0)
    assert now == pytest.approx(2.2 + 0.01 * 60)
    far = planned(asked, 2.2, rising, startup=10_000.0)
    assert far == pytest.approx(4.4)


def test_a_start_is_timed_by_phase_where_pods_say_when_they_got_their_node():
    service = Service(policy(), decode=1)
    for waited in (2.0, 40.0):
        pod = Pod(f"late-{waited}", Role.DECODE, phase="pending", created=service.now)
        service.pods.append(pod)
        service.tick()
        pod.phase, pod.scheduled = "ready", pod.created + waited
        found = service.tick()
    phases = found.phases[Role.DECODE, "plain"]
    assert (phases.unplaced, phases.loading) == (40.0, 58.0)
    assert service.memory.lasting.startups.loading == {"decode/plain": (58.0, 20.0)}


def test_a_container_that_starts_again_is_no_start_of_a_pod():

    def seen(now: float, pod: PodView) -> View:
        return View(now, {Role.DECODE: PoolView(1, None, {}, (pod,))}, {})

    loads = PodView("x", "plain", "starting", NOW, scheduled_since=NOW)
    about_to = dataclasses.replace(loads, served=True)  # its gate is not seen yet
    ready = dataclasses.replace(about_to, phase="ready", ready_since=NOW + 90)
    memory = StartupMemory()
    for now, pod in ((0, loads), (85, about_to), (90, ready), (900, about_to), (910, ready)):
        memory = time_startups(policy(), seen(NOW + now, pod), memory)
    assert memory.seconds == {"decode/plain": (90.0,)}
