"""All pools together: node types by price, exhausted ones, ratios, and one budget."""

import dataclasses

from support.sizing import TICK, World, need, pool, service, variant
from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.policy import Budget, Ratio
from vlm_operator.names import Role

DECODE, PREFILL, ENCODER = Role.DECODE, Role.PREFILL, Role.ENCODER


def test_growth_takes_the_cheapest_capacity_first_and_shrinking_the_dearest():
    cheap = variant("cheap", cost_per_hour=1.0, max_replicas=3)
    dear = variant("dear", cost_per_hour=4.0, speed=2.0)
    world = World(service(pool(DECODE, cheap, dear)), {DECODE: {"cheap": 2}})
    assert world.tick([need(5.0)])[DECODE].variants == {"cheap": 3, "dear": 1}
    for _ in range(80):
        last = world.tick([need(2.0)])[DECODE]
    assert last.variants == {"cheap": 3, "dear": 0}
    assert last.cost_per_hour == 3.0


def test_unknown_costs_are_equal_and_preference_decides():
    types = [
        variant(name, cost_per_hour=None, preference=rank) for name, rank in (("a", 1), ("b", 9))
    ]
    world = World(service(pool(DECODE, *types)), {DECODE: {"a": 1}})
    last = world.tick([need(2.0)])[DECODE]
    assert (last.variants, last.cost_per_hour) == ({"a": 1, "b": 1}, None)


def test_spot_counts_a_little_dearer_than_its_price():
    spot, steady = variant("spot", cost_per_hour=0.95, spot=True), variant("steady")
    world = World(service(pool(DECODE, spot, steady)), {DECODE: {"spot": 1}})
    assert world.tick([need(2.0)])[DECODE].variants == {"spot": 1, "steady": 1}
    spot = dataclasses.replace(spot, cost_per_hour=0.5)
    world = World(service(pool(DECODE, spot, steady)), {DECODE: {"spot": 1}})
    assert world.tick([need(2.0)])[DECODE].variants == {"spot": 2, "steady": 0}


def two_types(**changes) -> World:
    types = variant("a"), variant("b", cost_per_hour=3.0)
    constants = Constants(exhausted_seconds=600.0)
    world = World(service(pool(DECODE, *types), constants=constants, **changes), {DECODE: {"a": 2}})
    world.nodes = {"a": 2}
    return world


def run(world: World, units: float, seconds: float):
    for _ in range(int(seconds / TICK)):
        last = world.tick([need(units)])[DECODE]
    return last


def test_a_type_that_gives_no_node_is_left_for_the_next_one_by_cost():
    world = two_types()
    assert run(world, 3.0, 60).variants == {"a": 3, "b": 0}
    last = run(world, 3.0, 10)
    assert last.variants == {"a": 2, "b": 1}
    assert "variant a got no node in time" in last.capacity
    assert world.memory.pools[DECODE].exhausted["a"].times == 1
    assert run(world, 3.9, 600 - 20).variants == {"a": 2, "b": 2}
    assert world.decisions[DECODE].capacity
    assert run(world, 3.9, 20).capacity == ""


def test_a_type_is_tried_again_after_a_wait_that_doubles_until_a_pod_comes():
    world = two_types()
    run(world, 3.0, 670)
    assert run(world, 4.0, 5).variants == {"a": 3, "b": 1}  # cheaper, so tried again
    run(world, 4.0, 65)
    known = world.memory.pools[DECODE].exhausted["a"]
    assert (known.times, known.until - known.since) == (2, 1200.0)
    world.nodes["a"] = 9
    run(world, 4.0, 1200)
    run(world, 6.0, 60)
    assert world.decisions[DECODE].variants["a"] == 3
    assert world.memory.pools[DECODE].exhausted == {}


def test_a_type_that_gave_no_node_is_tried_by_one_pod_while_the_need_is_met_elsewhere():
    world = two_types()
    run(world, 3.0, 670)
    asked = [world.tick([need(6.0)])[DECODE].variants for _ in range(3)]
    assert [item["a"] for item in asked] == [3, 3, 3], "two stand, and one tries"
    assert asked[-1]["b"] >= 4, "the one that tries is no capacity before it has its node"


def test_a_pool_does_not_wait_for_nodes_that_another_pool_of_the_class_did_not_get():
    types = variant("a", node_class="cheap"), variant("b", cost_per_hour=3.0, node_class="dear")
    policy = service(pool(DECODE, *types), pool(PREFILL, *types))
    world = World(policy, {DECODE: {"a": 2}, PREFILL: {"a": 2}})
    world.nodes = {"a": 2}
    for _ in range(16):
        world.tick([need(3.0), need(1.0, PREFILL)])
    assert world.memory.pools[DECODE].exhausted["a"].nodes
    decisions = world.tick([need(3.0), need(4.0, PREFILL)])
    assert decisions[PREFILL].variants == {"a": 2, "b": 2}


def test_a_pool_that_was_told_of_lacking_nodes_grows_once_another_pool_gets_one():
    kind = variant("a", node_class="only")
    policy = service(pool(DECODE, kind), pool(PREFILL, kind))
    world = World(policy, {DECODE: {"a": 2}, PREFILL: {"a": 1}})
    world.nodes = {"a": 3}
    for _ in range(16):
        world.tick([need(3.0), need(0.5, PREFILL)])
    assert world.memory.pools[DECODE].exhausted["a"].nodes
    banned = [world.tick([need(3.0), need(2.0, PREFILL)])[PREFILL] for _ in range(12)]
    assert {(item.to, item.limited_by) for item in banned} == {(1, "Capacity")}
    world.nodes = {}
    grown = [world.tick([need(3.0), need(2.0, PREFILL)])[PREFILL].to for _ in range(3)]
    assert grown[-1] == 2, "decode's pod got its node: prefill need not wait for ten minutes"


def test_the_only_type_keeps_its_waiting_pods_for_they_bring_nodes():
    world = World(service(pool()), {DECODE: {"a": 2}})
    world.nodes = {"a": 2}
    last = run(world, 4.0, 300)
    assert (last.to, last.limited_by) == (4, "Capacity")
    assert last.capacity


def test_within_a_full_budget_a_waiting_pod_is_given_up_before_another_type_is_tried():
    world = two_types(budget=Budget(accelerators=3))
    run(world, 3.0, 60)
    sizes = []
    for _ in range(8):
        world.tick([need(3.0)])
        assert world.accelerators() <= 3
        sizes.append(dict(world.target[DECODE]))
    assert {"a": 2, "b": 0} in sizes
    assert sizes[-1] == {"a": 2, "b": 1}


def shared(size: int, *, budget: Budget) -> World:
    pools = [pool(role, maximum=20, up_pods=20) for role in (PREFILL, DECODE)]
    world = World(service(*pools, budget=budget), {role: {"a": size} for role in (PREFILL, DECODE)})
    world.drain = 100.0
    return world


def test_decode_comes_before_prefill_where_the_budget_does_not_suffice():
    world = shared(1, budget=Budget(accelerators=8))
    decisions = world.tick([need(9.0, PREFILL), need(9.0)])
    assert (decisions[DECODE].to, decisions[PREFILL].to) == (5, 3)
    assert {item.limited_by for item in decisions.values()} == {"Budget"}
    assert "the budget of 8 accelerators allows 5" in decisions[DECODE].message


def test_what_stands_is_not_taken_from_one_pool_for_another():
    world = shared(4, budget=Budget(accelerators=8))
    decisions = world.tick([need(4.0, PREFILL), need(9.0)])
    assert (decisions[DECODE].to, decisions[PREFILL].to) == (4, 4)
    assert (decisions[DECODE].reason, decisions[DECODE].limited_by) == ("Steady", "Budget")


def test_growth_waits_for_the_devices_of_pods_that_still_drain():
    world = shared(4, budget=Budget(accelerators=8))
    while world.replicas(PREFILL) == 4:
        world.tick([need(1.0, PREFILL), need(4.0)])
    waiting = world.tick([need(1.0, PREFILL), need(5.0)])[DECODE]
    assert (waiting.to, waiting.reason, waiting.limited_by) == (4, "WaitingForDevices", "Budget")
    assert "5 when draining pods" in waiting.message
    ticks = 1
    while world.replicas(DECODE) == 4:
        world.tick([need(1.0, PREFILL), need(5.0)])
        assert world.accelerators() <= 8
        ticks += 1
    assert ticks * TICK >= 95  # the drain


def test_a_budget_in_money_counts_what_the_types_cost():
    types = variant("a", cost_per_hour=2.0, max_replicas=2), variant("b", cost_per_hour=3.0)
    policy = service(pool(DECODE, *types), budget=Budget(cost_per_hour=7.5))
    world = World(policy, {DECODE: {"a": 1}})
    last = world.tick([need(5.0)])[DECODE]
    assert (last.variants, last.limited_by) == ({"a": 2, "b": 1}, "Budget")
    assert "the budget of 7.5 an hour allows 3" in last.message


def test_an_unreadable_budget_grows_nothing_and_still_shrinks():
    budget = Budget(cost_per_hour=9.0, unreadable="the cost of decode variant a is unknown")
    policy = service(pool(DECODE, variant(cost_per_hour=None)), budget=budget)
    world = World(policy, {DECODE: {"a": 3}})
    last = world.tick([need(5.0)])[DECODE]
    assert (last.to, last.limited_by) == (3, "BudgetUnreadable")
    assert "the budget cannot be computed: the cost of decode" in last.message
    assert run(world, 0.5, 310).to == 2


def test_a_budget_that_is_lowered_takes_replicas_at_once_the_unneeded_first():
    world = shared(4, budget=Budget(accelerators=8))
    world.tick([need(4.0, PREFILL), need(2.0)])
    world.policy = dataclasses.replace(world.policy, budget=Budget(accelerators=6))
    decisions = world.tick([need(4.0, PREFILL), need(2.0)])
    assert (decisions[DECODE].to, decisions[PREFILL].to) == (2, 4)
    assert (decisions[DECODE].reason, decisions[DECODE].limited_by) == ("Bounds", "Budget")


def test_advice_that_is_not_followed_takes_nothing_from_a_pool_that_others_scale():
    policy = service(
        pool(mode=ScalingMode.AUTO, maximum=20, up_pods=20),
        pool(PREFILL, mode=ScalingMode.EXTERNAL),
        budget=Budget(accelerators=6),
        apply=AutoscalingPolicy.ADVISORY,
    )
    world = World(policy, {DECODE: {"a": 2}, PREFILL: {"a": 1}})
    world.write(PREFILL, "hpa", 4)
    decisions = world.tick([need(9.0)])
    assert (decisions[PREFILL].to, decisions[PREFILL].limited_by) == (4, None)
    assert (decisions[DECODE].to, decisions[DECODE].recommendation) == (2, 5)


def test_a_ratio_makes_the_other_pool_grow_along_and_says_so():
    ratio = Ratio(ENCODER, PREFILL, 0.5, None)
    policy = service(pool(ENCODER), pool(PREFILL), pool_ratios=(ratio,))
    world = World(policy, {ENCODER: {"a": 1}, PREFILL: {"a": 2}})
    decisions = world.tick([need(0.5, ENCODER), need(4.0, PREFILL)])
    assert (decisions[ENCODER].to, decisions[PREFILL].to) == (2, 4)
    assert (decisions[ENCODER].reason, decisions[ENCODER].limited_by) == ("ScaleUp", "PoolRatio")


def test_a_ratio_that_the_bounds_do_not_allow_is_let_go():
    ratio = Ratio(ENCODER, PREFILL, 3.0, None)
    policy = service(pool(ENCODER, maximum=2), pool(PREFILL), pool_ratios=(ratio,))
    world = World(policy, {ENCODER: {"a": 1}, PREFILL: {"a": 2}})
    decisions = world.tick([need(0.5, ENCODER), need(4.0, PREFILL)])
    assert decisions[PREFILL].to == 4
