"""Pods that do not come are written off by their phase, and their node type is let alone."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sizing import NOW, TICK, World, need, pool, service, variant
from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.capacity import (
    PoolCapacity,
    count_capacity,
    start_timeouts,
)
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.estimate import Estimate
from vlm_operator.autoscale.history import Exhausted, ScalingHistory, ScalingMemory
from vlm_operator.autoscale.policy import Budget
from vlm_operator.autoscale.startups import Phases
from vlm_operator.autoscale.view import PodView, PoolView
from vlm_operator.names import Role

DECODE = Role.DECODE
HEAVY = variant("a", startup_seconds=600.0)  # its weights take ten minutes
TIMED = {(DECODE, "a"): Phases(unplaced=2.0, loading=550.0)}


def stock(pod: PodView, *, phases=TIMED, now: float) -> PoolCapacity:
    """A pool of one replica, with one pod."""
    rules = pool(DECODE, HEAVY)
    seen = PoolView(1, None, {"a": 1}, (pod,))
    estimate = Estimate((), {}, True, 0.0, {(DECODE, "a"): 600.0}, phases=phases)
    history = ScalingHistory(NOW, rules.mode)
    return count_capacity(service(rules), DECODE, seen, estimate, history, now=now)


@given(st.floats(0, 1300), st.booleans())
def test_a_pod_without_a_node_is_written_off_long_before_one_that_loads(seconds, measured):
    phases = TIMED if measured else {}
    pending = PodView("x", "a", "pending", NOW)
    starting = PodView("x", "a", "starting", NOW, scheduled_since=NOW)
    waits = stock(pending, phases=phases, now=NOW + seconds)
    loads = stock(starting, phases=phases, now=NOW + seconds)
    assert bool(waits.unschedulable["a"]) is (seconds >= (120.0 if measured else 1200.0))
    assert bool(loads.overdue["a"]) is (seconds >= (1100.0 if measured else 1200.0))
    assert not loads.unschedulable["a"]


@given(st.floats(0, 3000), st.floats(0, 1500))
def test_what_a_pod_waited_for_its_node_is_not_held_against_its_loading(waited, loads):
    pod = PodView("x", "a", "starting", NOW, scheduled_since=NOW + waited)
    found = stock(pod, now=NOW + waited + loads)
    assert bool(found.overdue["a"]) is (NOW + waited + loads - (NOW + waited) >= 1100.0)


@given(st.floats(1, 1e4), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1, 10))
def test_no_phase_is_given_more_time_than_a_whole_start(whole, unplaced, loading, factor):
    timed = {(DECODE, "a"): Phases(unplaced, loading)}
    estimate = Estimate((), {}, True, 0.0, {(DECODE, "a"): whole}, phases=timed)
    policy = service(pool(DECODE, HEAVY), constants=Constants(write_off=factor))
    for seconds in start_timeouts(policy, DECODE, "a", estimate):
        assert seconds <= factor * whole


def run(world: World, units: float, seconds: float):
    for _ in range(int(seconds / TICK)):
        last = world.tick([need(units)])[DECODE]
    return last


def two_types() -> World:
    """The cheap type has two nodes and loads for ten minutes; the dear one has plenty."""
    types = HEAVY, variant("b", cost_per_hour=3.0)
    world = World(service(pool(DECODE, *types)), {DECODE: {"a": 2}})
    world.nodes, world.phases = {"a": 2}, TIMED
    return world


def test_a_type_without_nodes_makes_way_in_minutes_and_not_in_two_starts():
    world = two_types()
    assert run(world, 3.0, 120).variants == {"a": 3, "b": 0}
    last = run(world, 3.0, 10)
    assert last.variants == {"a": 2, "b": 1}
    assert "variant a got no node in time" in last.capacity


def test_a_node_that_comes_ends_the_wait_for_nodes_and_a_ready_pod_every_wait():
    world = World(service(pool(DECODE, HEAVY)), {DECODE: {"a": 2}})
    world.nodes, world.phases, world.startup = {"a": 2}, TIMED, 2000.0
    run(world, 3.0, 130)
    assert world.memory.pools[DECODE].exhausted["a"].nodes
    world.nodes = {"a": 3}
    assert run(world, 3.0, 15).capacity == "", "it has a node, and now loads"
    last = run(world, 3.0, 1150)
    assert "variant a got no ready pod in time" in last.capacity
    assert not world.memory.pools[DECODE].exhausted["a"].nodes
    world.startup = 0.0
    assert run(world, 3.0, 15).capacity == ""


@pytest.mark.parametrize("mode", [ScalingMode.EXTERNAL, ScalingMode.AUTO])
def test_a_pod_waits_on_for_its_node_where_the_budget_allows_no_other_type(mode):
    """Given up, it would be asked for anew after each back-off: 2, 3, 2, 3."""
    types = variant("a"), variant("b", cost_per_hour=3.0)
    rules = pool(DECODE, *types, mode=mode)
    world = World(service(rules, budget=Budget(None, 4.0)), {DECODE: {"a": 2}})
    world.nodes = {"a": 2}
    if mode is ScalingMode.EXTERNAL:
        world.write(DECODE, "hpa", 3)
    sizes = [run(world, 2.9, TICK).to for _ in range(600)]
    assert set(sizes) == {3}
    assert "variant a got no node in time" in world.decisions[DECODE].capacity
    dear = [item.variant for item in world.pods if item.variant == "b"]
    assert not dear
    world.nodes = {"a": 3}
    assert run(world, 2.9, 60).capacity == ""


def min_of_two(budget: Budget) -> World:
    """Two replicas at least: one serves, the other waits for a node of a type that has none."""
    types = variant("a"), variant("b", cost_per_hour=3.0)
    rules = pool(DECODE, *types, minimum=2)
    world = World(service(rules, budget=budget), {DECODE: {"a": 1}})
    world.nodes, world.target[DECODE], world.numbers[DECODE] = {"b": 0}, {"a": 1, "b": 1}, 2
    world.carry_out({})
    gone = Exhausted(NOW, NOW + 600.0, times=1, nodes=True, late=("pod-2",))
    pace = ScalingHistory(NOW, rules.mode, exhausted={"b": gone}, standing={"a": 1, "b": 1})
    world.memory = ScalingMemory({DECODE: pace})
    world.advance(120.0)
    assert [(item.variant, item.phase) for item in world.pods] == [("a", "ready"), ("b", "pending")]
    return world


@pytest.mark.parametrize("units", [0.1, 0.9])
def test_a_pod_without_a_node_holds_no_place_of_the_minimum_against_a_type_that_has_nodes(units):
    world = min_of_two(Budget())
    last = world.tick([need(units)])[DECODE]
    assert (last.variants, last.reason) == ({"a": 2, "b": 0}, "Replacing")


def test_what_takes_the_place_of_pods_without_a_node_never_grows_and_shrinks_in_turn():
    """The budget allows one more pod beside the pending one, and two without it."""
    world = min_of_two(Budget(None, 5.0))
    first = world.tick([need(2.9)], seconds=0.0)[DECODE]
    again = world.tick([need(2.9)], seconds=0.0)[DECODE]
    assert (first.to - first.before) * (again.to - again.before) >= 0
    sizes = [first.to, again.to] + [run(world, 2.9, TICK).to for _ in range(3)]
    assert sizes == sorted(sizes)
    assert world.decisions[DECODE].variants == {"a": 3, "b": 0}


def test_no_pod_is_given_up_for_a_type_that_is_only_being_tried():
    """Both types gave no node; a pod tries the first, and it takes no other pod's place."""
    types = variant("a"), variant("b", cost_per_hour=3.0)
    world = World(service(pool(DECODE, *types)), {DECODE: {"a": 1}})
    world.nodes, world.target[DECODE], world.numbers[DECODE] = {"a": 1, "b": 0}, {"a": 1, "b": 1}, 2
    world.carry_out({})
    world.advance(120.0)
    world.target[DECODE], world.numbers[DECODE] = {"a": 2, "b": 1}, 3
    world.carry_out({})
    tried = Exhausted(NOW, world.now - 1.0, times=1, nodes=True, late=("x",))
    gone = Exhausted(NOW, world.now + 600.0, times=2, nodes=True, late=("pod-2",))
    pace = ScalingHistory(
        NOW, ScalingMode.AUTO, exhausted={"a": tried, "b": gone}, standing={"a": 2, "b": 1}
    )
    world.memory = ScalingMemory({DECODE: pace})
    assert world.tick([need(2.9)])[DECODE].variants == {"a": 2, "b": 1}


@given(
    crashes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 50), st.floats(1, 3000)), max_size=5
    ),
    mode=st.sampled_from([ScalingMode.MANUAL, ScalingMode.EXTERNAL, ScalingMode.AUTO]),
    asked=st.integers(40, 60),
)
@settings(max_examples=30)
def test_a_pod_that_was_ready_never_shows_that_its_node_type_lacks_anything(crashes, mode, asked):
    """Ticks are 40 s; pods are down for up to 50 minutes, from before the pool is asked to grow."""
    rules = pool(DECODE, HEAVY, mode=mode, replicas=2)
    world = World(service(rules), {DECODE: {"a": 2}})
    world.phases = TIMED
    for tick in range(asked):
        for which, at, down in crashes:
            ready = [pod for pod in world.pods if pod.phase == "ready"]
            if at == tick and which < len(ready):
                world.crash(ready[which], down=down)
        assert world.tick([need(1.5)], seconds=40)[DECODE].capacity == ""
    standing = world.replicas(DECODE)
    world.policy = service(dataclasses.replace(rules, replicas=standing + 1))
    if mode is ScalingMode.EXTERNAL:
        world.write(DECODE, "hpa", standing + 1)
    assert world.tick([need(standing + 0.5)])[DECODE].to >= standing + 1


@pytest.mark.parametrize("mode", [ScalingMode.EXTERNAL, ScalingMode.MANUAL])
def test_a_pool_grows_after_its_pod_was_killed_and_came_back(mode):
    rules = pool(DECODE, variant("a"), mode=mode, replicas=2)
    world = World(service(rules), {DECODE: {"a": 2}})
    run(world, 2.0, 600)
    world.crash(world.pods[0], down=9.0)
    assert world.tick([need(2.0)])[DECODE].capacity == ""
    run(world, 2.0, 15)
    world.policy = service(dataclasses.replace(rules, replicas=3))
    world.write(DECODE, "kubectl", 3)
    assert world.tick([need(2.0)])[DECODE].variants == {"a": 3}


def test_a_pod_that_is_down_for_longer_than_a_start_is_no_capacity_and_gets_a_substitute():
    world = World(service(pool(DECODE, variant("a"))), {DECODE: {"a": 2}})
    run(world, 2.0, 600)
    world.crash(world.pods[0], down=1e6)
    assert run(world, 2.0, 60).variants == {"a": 2}, "it may come back"
    assert run(world, 2.0, 10).variants == {"a": 3}


def test_a_pod_that_becomes_ready_ends_the_write_off():
    """Though its gate is older, or its time, in whole seconds, seems to be."""
    rules = pool(DECODE, variant("a"))
    known = Exhausted(since=NOW + 0.7, until=NOW + 600, times=1, late=("late",))
    pace = ScalingHistory(NOW, rules.mode, exhausted={"a": known})
    all_along = PodView("x", "a", "ready", NOW - 900, NOW - 800, NOW - 890, True)
    back = dataclasses.replace(all_along, became_ready=NOW + 3)
    late = PodView("late", "a", "ready", NOW - 60, NOW, NOW - 50, True, became_ready=NOW)
    for pod, found in ((all_along, {"a": known}), (back, {}), (late, {})):
        seen = PoolView(1, None, {"a": 1}, (pod,))
        estimate = Estimate((), {}, True, 0.0, {})
        counted = count_capacity(service(rules), DECODE, seen, estimate, pace, now=NOW + 5)
        assert counted.exhausted == found


@given(
    st.sampled_from(["pending", "starting"]),
    st.sampled_from(["", "old", "new"]),
    st.sampled_from(["", "here", "there"]),
    st.sampled_from(["new", "other"]),
    st.sampled_from(["here", "elsewhere"]),
)
def test_only_a_failure_that_a_new_pod_would_repeat_exhausts_a_variant(
    phase, revision, placement, after, fits
):
    """A crash is one of the revision; a missing node is one of the placement."""
    rules = pool(DECODE, HEAVY)
    policy, estimate = service(rules), Estimate((), {}, True, 0.0, {(DECODE, "a"): 600.0})
    scheduled = None if phase == "pending" else NOW
    pod = PodView("x", "a", phase, NOW, None, scheduled, revision=revision, placement=placement)
    seen = PoolView(1, None, {"a": 1}, (pod,), False, {"a": "new"}, {"a": "here"})
    fresh = ScalingHistory(NOW, rules.mode)
    found = count_capacity(policy, DECODE, seen, estimate, fresh, now=NOW + 1200.0).exhausted
    known, expected = (placement, "here") if phase == "pending" else (revision, "new")
    assert ("a" in found) is (known in ("", expected))
    # the target changes, and the pod is gone
    target = dataclasses.replace(seen, pods=(), revisions={"a": after}, placements={"a": fits})
    history = dataclasses.replace(fresh, exhausted=found)
    kept = count_capacity(policy, DECODE, target, estimate, history, now=NOW + 1201.0).exhausted
    same = fits == "here" if phase == "pending" else after == "new"
    assert kept == (found if same else {})
