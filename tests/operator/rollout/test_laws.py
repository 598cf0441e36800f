"""What holds at every step of every rollout, whatever starts, falls ill or is cut off when."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.fleet import CHAIN, Fleet
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.rollout.replica_counts import SurgeLimits
from vlm_operator.rollout.steps import Step

TURNS = 200


@st.composite
def limits_by_role(draw: st.DrawFn) -> SurgeLimits:
    surge = draw(st.integers(0, 3))
    return SurgeLimits(surge, draw(st.integers(0 if surge else 1, 2)))


def sizes(draw: st.DrawFn, topology: str) -> dict[Role, int]:
    return {
        role: draw(st.integers(0 if role is Role.ENCODER and topology == "epd" else 1, 5))
        for role in POOL_ROLES
    }


@st.composite
def fleets(draw: st.DrawFn, *, together: bool | None = None) -> Fleet:
    """Any service on its way to any other, nothing begun yet."""
    start, end = draw(st.sampled_from(sorted(CHAIN))), draw(st.sampled_from(sorted(CHAIN)))
    fleet = Fleet(start, sizes(draw, start), gateways=draw(st.integers(1, 3)))
    another = draw(st.booleans()) if together is None else together
    compat = "two" if another else "one"
    fleet.aim(end, compat, sizes(draw, end), gateways=draw(st.integers(1, 3)))
    fleet.limits_by_role = {role: draw(limits_by_role()) for role in POOL_ROLES}
    return fleet


def has_capacity(fleet: Fleet) -> bool:
    """Whether every pool can hold an old pod and a new one at once."""
    return all(
        not fleet.whole(role) or fleet.whole(role) + fleet.limits_by_role[role].surge >= 2
        for role in POOL_ROLES
    )


def advance(fleet: Fleet, data: st.DataObject, *, calm: bool) -> Step:
    """One turn: a plan, carried out whole or in part, and something happens to some pods."""
    step = fleet.step()
    fleet.write(step, only=None if calm else data.draw(st.integers(0, 8)))
    fleet.create()
    fleet.leave()
    fleet.prune(step)
    for key in fleet.names():
        if calm or data.draw(st.booleans()):
            fleet.start(key)
    return step


def run(fleet: Fleet, data: st.DataObject, check, *, calm_after: int = 12) -> None:
    """Turn until the rollout is done, asking `check(step)` after each plan is carried out."""
    for turn in range(TURNS):
        step = advance(fleet, data, calm=turn >= calm_after)
        check(step)
        if step.done and turn >= calm_after and settled(fleet):
            return
    raise AssertionError(f"never done: {fleet.step()} {fleet.states()}")


def settled(fleet: Fleet) -> bool:
    wanted = {(*key, goal.revision) for key, goal in fleet.goals.items()}
    return all(key in wanted for key in fleet.live) and all(
        fleet.asked(role) == fleet.ready(role) == fleet.whole(role) for role in POOL_ROLES
    )


@given(fleets(), st.data())
@settings(max_examples=120, deadline=None)
def test_a_rollout_ends_and_never_asks_for_more_than_the_target_and_its_surge(
    fleet: Fleet, data: st.DataObject
):
    most = {role: fleet.asked(role) for role in POOL_ROLES}

    def check(step: Step) -> None:
        for role in POOL_ROLES:
            whole, asked = fleet.whole(role), fleet.asked(role)
            bound = max(most[role], whole + fleet.limits_by_role[role].surge if whole else 0)
            assert asked <= bound, role
            most[role] = min(most[role], max(asked, whole))

    run(fleet, data, check)
    assert set(fleet.gateways) == {fleet.goals[Role.GATEWAY, ""].compat}


@given(fleets(), st.data())
@settings(max_examples=50, deadline=None)
def test_no_step_takes_a_pod_with_traffic_below_what_must_be_available(
    fleet: Fleet, data: st.DataObject
):
    for _ in range(60):
        before = {role: fleet.reachable(role) for role in POOL_ROLES}
        fleet.write(fleet.step())
        fleet.leave()
        for role in POOL_ROLES:
            floor = fleet.limits_by_role[role].floor(fleet.whole(role))
            assert fleet.reachable(role) >= min(before[role], floor), role
        fleet.create()
        for key in fleet.names():
            event = data.draw(st.sampled_from(["start", "start", "ill", "nothing"]))
            if event == "start":
                fleet.start(key)
            elif event == "ill":
                fleet.fall_ill(key)
        if fleet.step().done:
            return


@given(fleets(), st.data())
@settings(max_examples=120, deadline=None)
def test_whatever_has_traffic_can_serve_every_stage(fleet: Fleet, data: st.DataObject):
    assume(has_capacity(fleet))

    def check(step: Step) -> None:
        for compat in fleet.fronted():
            assert fleet.complete(compat), compat
        assert fleet.fronted()

    run(fleet, data, check)


@given(fleets(together=True), st.data())
@settings(max_examples=80, deadline=None)
def test_a_third_revision_amid_a_rollout_ends_as_well(fleet: Fleet, data: st.DataObject):
    for _ in range(data.draw(st.integers(0, 6))):
        advance(fleet, data, calm=False)
    counts = {role: data.draw(st.integers(1, 4)) for role in POOL_ROLES}
    fleet.aim(data.draw(st.sampled_from(sorted(CHAIN))), "three", counts, gateways=1)
    fleet.goals = {
        key: goal if key[0] is Role.GATEWAY else type(goal)("newer", goal.compat, goal.stages)
        for key, goal in fleet.goals.items()
    }

    def check(step: Step) -> None:
        if has_capacity(fleet):
            assert fleet.fronted()

    run(fleet, data, check)


@given(fleets(), st.data())
@settings(max_examples=80, deadline=None)
def test_planning_over_what_a_plan_wrote_plans_the_same(fleet: Fleet, data: st.DataObject):
    for _ in range(data.draw(st.integers(0, 8))):
        advance(fleet, data, calm=False)
    first = fleet.step()
    assert fleet.step() == first
    fleet.write(first)
    again = fleet.step()
    assert {k: n for k, n in again.replicas.items() if n} == {
        k: n for k, n in first.replicas.items() if n
    }
    assert again.gateways == first.gateways


@given(fleets(), st.data())
@settings(max_examples=80, deadline=None)
def test_ups_during_a_rollout_go_to_the_new_revision_and_downs_come_out_of_the_old(
    fleet: Fleet, data: st.DataObject
):
    for _ in range(data.draw(st.integers(1, 6))):
        advance(fleet, data, calm=False)
    role = data.draw(st.sampled_from([role for role in POOL_ROLES if fleet.whole(role)]))
    new = (role, "default", "new")
    before = {key: item.desired for key, item in fleet.live.items()}
    size = data.draw(st.integers(1, 8))
    fleet.target[role, "default"] = size
    step = fleet.step()
    for key, count in before.items():
        if key[2] == "old":
            assert step.replicas.get(key, 0) <= count, "nothing is added to the old"
    assert step.replicas.get(new, 0) >= min(before.get(new, 0), size), "the new are not taken"
    run(fleet, data, lambda step: None)


@pytest.mark.parametrize("start", sorted(CHAIN))
@pytest.mark.parametrize("end", sorted(CHAIN))
@pytest.mark.parametrize("compat", ["one", "two"])
def test_each_topology_becomes_each_other_and_serves_every_stage_all_the_way(
    start: str, end: str, compat: str
):
    two = dict.fromkeys(POOL_ROLES, 2)
    fleet = Fleet(start, two)
    fleet.aim(end, compat, two, gateways=1)
    fleet.limits_by_role = {role: SurgeLimits(1, 0) for role in POOL_ROLES}
    for _ in range(TURNS):
        step = advance(fleet, None, calm=True)  # type: ignore[arg-type] - calm draws nothing
        assert [name for name in fleet.fronted() if fleet.complete(name)] == fleet.fronted()
        assert fleet.fronted()
        if step.done and settled(fleet):
            break
    else:
        raise AssertionError("never done")
    assert {key[0] for key in fleet.live} == set(CHAIN[end])
