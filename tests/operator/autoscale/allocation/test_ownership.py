"""Who owns a pool's number: the manifest, whoever writes VLMPool, or the autoscaler."""

import dataclasses

import pytest

from support.sizing import World, need, pool, service
from vlm_operator import names
from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.policy import Budget
from vlm_operator.names import Role

DECODE = Role.DECODE


def world(size=2, *, budget=None, **changes) -> World:
    return World(service(pool(**changes), budget=budget or Budget()), {DECODE: {"a": size}})


def turn(found: World, units=2.0):
    return found.tick([need(units)])[DECODE]


@pytest.mark.parametrize(
    ("owner", "reason"), [(names.MANAGER_AUTOSCALER, "Manual"), ("kubectl", "PutBack")]
)
def test_manual_claims_what_the_manifest_says_whoever_wrote(owner, reason):
    found = world(5, mode=ScalingMode.MANUAL, replicas=3, minimum=0, maximum=0)
    found.write(DECODE, owner, 5)
    last = turn(found)
    assert (last.to, last.claim, last.reason) == (3, 3, reason)
    assert (owner == "kubectl") == ("External" in last.message)


@pytest.mark.parametrize(
    ("asked", "to", "limit"),
    [
        pytest.param(3, 3, None, id="within bounds"),
        pytest.param(9, 8, "Max", id="above the maximum"),
        pytest.param(0, 1, "Min", id="below the minimum"),
    ],
)
def test_external_follows_vlmpool_and_never_writes_it(asked, to, limit):
    found = world(mode=ScalingMode.EXTERNAL)
    found.write(DECODE, "hpa", asked)
    last = turn(found, 7.0)
    assert (last.to, last.limited_by, last.claim) == (to, limit, None)
    assert limit is None or f"{limit.lower()}Replicas is {to}" in last.message


def test_a_new_pool_of_mode_external_starts_at_the_live_count_or_the_minimum():
    for live, start in ((0, 2), (5, 5)):
        found = world(live, mode=ScalingMode.EXTERNAL, minimum=2)
        found.numbers[DECODE] = None
        assert turn(found).claim == start


def test_external_is_clamped_to_the_budget_and_says_so():
    found = world(mode=ScalingMode.EXTERNAL, budget=Budget(accelerators=3))
    found.write(DECODE, "hpa", 6)
    last = turn(found)
    assert (last.to, last.limited_by, last.claim) == (3, "Budget", None)
    assert "3 accelerators" in last.message
    found.write(DECODE, "hpa", 1)
    assert turn(found).to == 1  # down at once: draining is the rollout's


def test_a_foreign_number_is_the_baseline_for_one_window_and_then_ours_again():
    found = world()
    turn(found)
    found.write(DECODE, "kubectl", 5)
    last = turn(found)
    assert (last.to, last.claim, last.reason) == (5, None, "ForeignWrite")
    for _ in range(58):
        assert turn(found).to == 5
    while found.owners[DECODE] == "kubectl":
        last = turn(found)
    assert last.reason != "ForeignWrite"
    assert last.claim == last.to
    assert turn(found).to <= 5


def test_a_second_number_within_the_window_is_a_conflict_and_is_held():
    found = world()
    found.write(DECODE, "hpa", 5)
    turn(found)
    found.write(DECODE, "hpa", 6)
    last = turn(found)
    assert (last.reason, last.conflict, last.claim, last.to) == ("ScalingConflict", True, None, 6)
    assert "hpa" in last.message
    assert "mode External" in last.message
    found.now += 9999
    assert turn(found, 1.0).conflict
    found.write(DECODE, names.MANAGER_AUTOSCALER, 6)
    assert not turn(found).conflict


def test_another_writer_is_another_baseline_and_bounds_hold_for_it():
    found = world()
    found.write(DECODE, "hpa", 5)
    turn(found)
    found.write(DECODE, "kubectl", 50)
    last = turn(found)
    assert (last.conflict, last.to, last.limited_by) == (False, 8, "Max")


def test_a_change_to_mode_auto_begins_a_window_of_its_own():
    found = world(6, mode=ScalingMode.EXTERNAL)
    for _ in range(100):
        turn(found, 1.0)
    found.policy = service(pool())
    for _ in range(60):
        assert turn(found, 1.0).to == 6
    assert turn(found, 1.0).to == 5


def test_a_vlmpool_that_was_deleted_comes_back_with_the_live_count():
    for mode in (ScalingMode.AUTO, ScalingMode.EXTERNAL):
        found = world(3, mode=mode)
        turn(found, 3.0)
        found.numbers[DECODE] = None
        last = turn(found, 3.0)
        assert (last.to, last.claim) == (3, 3)


def test_a_manual_pool_within_a_budget_keeps_its_claim():
    found = world(2, mode=ScalingMode.MANUAL, replicas=4, budget=Budget(accelerators=3))
    last = turn(found)
    assert (last.to, last.claim, last.limited_by) == (3, 4, "Budget")
    wide = dataclasses.replace(found.policy, budget=Budget(accelerators=8))
    found.policy = wide
    assert turn(found).to == 4
