"""Pods that do not come are written off by their phase, and their node type is let alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settling_support import NOW, TICK, World, need, pool, service, variant

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.estimating.estimate import Estimate
from vlm_operator.autoscale.estimating.horizon import Phases
from vlm_operator.autoscale.policy import Budget
from vlm_operator.autoscale.settling.paced import PoolPace
from vlm_operator.autoscale.settling.stock import Stock, patience, take_stock
from vlm_operator.autoscale.tuning import Tuning
from vlm_operator.autoscale.view import PodView, PoolView
from vlm_operator.names import Role

DECODE = Role.DECODE
HEAVY = variant("a", startup_seconds=600.0)  # its weights take ten minutes
TIMED = {(DECODE, "a"): Phases(unplaced=2.0, loading=550.0)}


def stock(pod: PodView, *, phases=TIMED, now: float) -> Stock:
    """A pool of one replica, with one pod."""
    rules = pool(DECODE, HEAVY)
    seen = PoolView(1, None, {"a": 1}, (pod,))
    estimate = Estimate((), {}, True, 0.0, {}, phases=phases)
    return take_stock(rules, seen, PoolPace(NOW, rules.mode), estimate, Tuning(), now=now)


@given(st.floats(0, 1300), st.booleans())
def test_a_pod_without_a_node_is_written_off_long_before_one_that_loads(seconds, measured):
    phases = TIMED if measured else {}
    pending = PodView("x", "a", "pending", NOW)
    starting = PodView("x", "a", "starting", NOW, scheduled_since=NOW)
    waits = stock(pending, phases=phases, now=NOW + seconds)
    loads = stock(starting, phases=phases, now=NOW + seconds)
    assert bool(waits.stuck) is (seconds >= (120.0 if measured else 1200.0))
    assert bool(loads.overdue) is (seconds >= (1100.0 if measured else 1200.0))
    assert not loads.stuck


@given(st.floats(0, 3000), st.floats(0, 1500))
def test_what_a_pod_waited_for_its_node_is_not_held_against_its_loading(waited, loads):
    pod = PodView("x", "a", "starting", NOW, scheduled_since=NOW + waited)
    found = stock(pod, now=NOW + waited + loads)
    assert bool(found.overdue) is (NOW + waited + loads - (NOW + waited) >= 1100.0)


@given(st.floats(1, 1e4), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1, 10))
def test_no_phase_is_given_more_time_than_a_whole_start(whole, unplaced, loading, factor):
    timed = {(DECODE, "a"): Phases(unplaced, loading)}
    estimate = Estimate((), {}, True, 0.0, {(DECODE, "a"): whole}, phases=timed)
    for seconds in patience(DECODE, HEAVY, estimate, Tuning(write_off=factor)):
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
    assert "variant a gave no node in time" in last.capacity


def test_a_node_that_comes_ends_the_wait_for_nodes_and_a_ready_pod_every_wait():
    world = World(service(pool(DECODE, HEAVY)), {DECODE: {"a": 2}})
    world.nodes, world.phases, world.startup = {"a": 2}, TIMED, 2000.0
    run(world, 3.0, 130)
    assert world.memory.pools[DECODE].exhausted["a"].nodes
    world.nodes = {"a": 3}
    assert run(world, 3.0, 15).capacity == "", "it has a node, and now loads"
    last = run(world, 3.0, 1150)
    assert "variant a gave no ready pod in time" in last.capacity
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
    assert "variant a gave no node in time" in world.decisions[DECODE].capacity
    dear = [item.variant for item in world.pods if item.variant == "b"]
    assert not dear
    world.nodes = {"a": 3}
    assert run(world, 2.9, 60).capacity == ""
