"""A whole service at zero: when it falls asleep, what wakes it, and what never happens.

pytest -m full tests/operator/autoscale/test_sleep.py
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sizing import pool, variant
from support.sleepers import IDLE, GatewayPod, SleepWorld, random_life, sleeper
from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.decide import Memory, decide, decide_replicas
from vlm_operator.autoscale.explain import explain
from vlm_operator.autoscale.history import ScalingMemory
from vlm_operator.autoscale.memory import dump, load
from vlm_operator.autoscale.policy import Budget, Ratio
from vlm_operator.autoscale.record import Record, differences, load_record, replay
from vlm_operator.autoscale.sleep import Verdict, decide_sleep
from vlm_operator.names import Role


def reasons(found) -> set[str]:
    return {item.reason for item in found.values()}


def until_asleep(world: SleepWorld) -> float:
    """Let the service fall asleep; return how long it took."""
    began = world.now
    while not world.asleep:
        world.turn()
        assert world.now - began < 100 * IDLE
    return world.now - began


def restart_operator(world: SleepWorld) -> None:
    world.memory = load(dump(Memory(pace=world.memory)), now=world.now).pace


# One life, step by step


def test_it_falls_asleep_after_the_idle_time_and_not_before():
    world = SleepWorld(sleeper())
    began = world.now
    while world.now - began < IDLE:
        assert "ScaledToZero" not in reasons(world.turn())
    found = world.turn()
    assert reasons(found) == {"ScaledToZero"}
    assert {(item.before, item.to, item.claim) for item in found.values()} == {(1, 0, 0)}
    assert "no request for 60 s" in found[Role.DECODE].message


def test_while_it_sleeps_nothing_changes_from_tick_to_tick():
    world = SleepWorld(sleeper())
    until_asleep(world)
    world.turn()
    kept = world.memory
    for _ in range(50):
        found = world.turn(1.0)
        assert {(item.before, item.to, item.recommendation) for item in found.values()} == {
            (0, 0, 0)
        }
        assert len({item.message for item in found.values()}) == 1
    assert world.memory.sleep is not None
    assert world.memory.sleep.lasting == kept.sleep.lasting
    for role, history in world.memory.pools.items():
        assert history.decisions == kept.pools[role].decisions


def test_a_request_starts_every_pool_at_its_minimum_at_once():
    roles = (Role.ENCODER, Role.PREFILL, Role.DECODE)
    policy = sleeper(*roles)
    pools = {
        Role.ENCODER: pool(Role.ENCODER, minimum=0),
        Role.PREFILL: pool(Role.PREFILL, minimum=2, up_pods=1, up_seconds=600.0),
        Role.DECODE: pool(Role.DECODE, minimum=3),
    }
    world = SleepWorld(dataclasses.replace(policy, pools=pools))
    until_asleep(world)
    world.turn()
    world.ask(world.gateways[0])
    found = world.turn(1.0)
    assert reasons(found) == {"WokenByRequest"}
    assert {role: item.to for role, item in found.items()} == dict(
        zip(roles, (1, 2, 3), strict=True)
    )
    assert "was at zero for" in found[Role.DECODE].message
    for _ in range(10):
        world.turn()
    assert world.in_flight == 0
    assert len(world.answered) == 1


def test_requests_in_flight_and_waiting_keep_it_awake():
    world = SleepWorld(sleeper())
    world.ask(world.gateways[0], seconds=10 * IDLE)
    for _ in range(100):
        assert "ScaledToZero" not in reasons(world.turn())
    assert until_asleep(world) >= IDLE


def test_a_request_while_the_pods_drain_wakes_it():
    world = SleepWorld(sleeper())
    world.drain = 60.0
    until_asleep(world)
    assert any(item.phase == "draining" for item in world.pods)
    world.ask(world.gateways[0], seconds=10.0)  # a draining pod answers it
    assert reasons(world.turn(1.0)) == {"WokenByRequest"}


def test_requests_that_need_no_workers_neither_keep_it_awake_nor_wake_it():
    world = SleepWorld(sleeper())
    world.drain = 60.0
    world.gateways[0].num_tokenizing = 1
    until_asleep(world)
    assert any(item.phase == "draining" for item in world.pods)
    for _ in range(20):
        assert reasons(world.turn()) == {"ScaledToZero"}


def test_a_silent_gateway_keeps_it_awake_and_its_own_count_decides_later():
    world = SleepWorld(sleeper(), gateways=2)
    world.gateways[1].silent = True
    for _ in range(100):
        assert "ScaledToZero" not in reasons(world.turn())
    world.gateways[1].silent = False  # it was idle all the time, and says so
    assert reasons(world.turn()) == {"ScaledToZero"}


def test_a_gateway_of_an_older_image_keeps_it_awake():
    world = SleepWorld(sleeper())
    world.now += 10 * IDLE
    view = world.view()
    old = {uid: dataclasses.replace(item, idle_seconds=None) for uid, item in view.samples.items()}
    for samples in (old, {}):
        found = decide_sleep(world.policy, dataclasses.replace(view, samples=samples), None)
        assert found.verdict is Verdict.AWAKE
    nobody = dataclasses.replace(view, gateways=())
    assert decide_sleep(world.policy, nobody, None).verdict is Verdict.AWAKE


def test_what_ends_unseen_counts_as_a_request():
    """A gateway's process, a gateway, and the operator itself: each begins a new idle time."""

    def restarted(world):
        world.restart(world.gateways[1])

    def removed(world):
        world.gateways.pop()

    for event in (restarted, removed, restart_operator):
        world = SleepWorld(sleeper(), gateways=2)
        for _ in range(10):
            world.turn()
        event(world)
        assert until_asleep(world) >= IDLE, event


def test_a_rollout_a_foreign_number_and_another_mode_keep_it_awake():
    world = SleepWorld(sleeper())
    for _ in range(20):
        world.rolling = True
        assert "ScaledToZero" not in reasons(world.turn())
    world.rolling = False
    world.write(Role.DECODE, "kubectl", 2)
    assert "ScaledToZero" not in reasons(world.turn())
    pools = {**world.policy.pools, Role.DECODE: pool(mode=ScalingMode.MANUAL, replicas=1)}
    world.policy = dataclasses.replace(world.policy, pools=pools)
    for _ in range(100):
        assert "ScaledToZero" not in reasons(world.turn())


def test_kubectl_scale_wakes_it_too_and_it_stays_for_the_idle_time():
    world = SleepWorld(sleeper())
    until_asleep(world)
    world.turn()
    world.write(Role.DECODE, "kubectl", 1)
    found = world.turn()
    assert found[Role.PREFILL].to == 1, "one pool alone serves nothing"
    assert found[Role.PREFILL].reason == "Bounds"
    assert until_asleep(world) >= IDLE


@pytest.mark.parametrize("change", ["removed", "off", "advisory"])
def test_without_the_rule_or_without_active_decisions_it_is_awake(change):
    world = SleepWorld(sleeper())
    until_asleep(world)
    world.turn()
    world.policy = {
        "removed": dataclasses.replace(world.policy, sleep=None),
        "off": dataclasses.replace(world.policy, apply=AutoscalingPolicy.OFF),
        "advisory": dataclasses.replace(world.policy, apply=AutoscalingPolicy.ADVISORY),
    }[change]
    found = world.turn()
    assert {item.to for item in found.values()} == {1}
    for _ in range(100):
        world.turn()
    assert not world.asleep


def test_a_new_service_starts_before_it_may_sleep():
    world = SleepWorld(sleeper())
    world.pods.clear()
    view = world.view()
    fresh = {
        role: dataclasses.replace(item, replicas=None, live={}) for role, item in view.pools.items()
    }
    world.tick([])
    found, _ = decide_replicas(
        world.policy, dataclasses.replace(view, pools=fresh), world.estimate, ScalingMemory()
    )
    assert {item.to for item in found.values()} == {1}


def test_a_slow_first_start_is_no_idle_time():
    world = SleepWorld(sleeper())
    world.startup = 20 * IDLE
    for item in world.pods:
        item.phase, item.ready_since = "starting", None
    while not all(item.phase == "ready" for item in world.pods):
        assert "ScaledToZero" not in reasons(world.turn())
    assert until_asleep(world) >= IDLE


def test_a_service_whose_pods_never_become_ready_stays_and_shows_why():
    world = SleepWorld(sleeper())
    until_asleep(world)
    world.turn()
    world.startup = 1e9
    world.ask(world.gateways[0])
    world.turn(1.0)
    world.gateways[0].requests.clear()  # its client has left
    for _ in range(200):
        assert "ScaledToZero" not in reasons(world.turn())


def test_a_deleted_vlmpool_of_a_sleeping_service_comes_back_at_zero():
    world = SleepWorld(sleeper())
    until_asleep(world)
    world.turn()
    world.numbers[Role.DECODE] = None
    found = world.turn()
    assert {item.claim for item in found.values()} == {0}


# Restarts of the operator, and writes that fail


def test_an_operator_that_starts_finds_a_sleeping_service_asleep():
    for forget in (False, True):
        world = SleepWorld(sleeper())
        until_asleep(world)
        world.turn()
        since = world.memory.sleep.since
        if forget:  # the ConfigMap is lost
            world.memory = ScalingMemory()
        else:
            restart_operator(world)
        assert reasons(world.turn()) == {"ScaledToZero"}
        assert (world.memory.sleep.since == since) is not forget
        world.ask(world.gateways[0])
        assert reasons(world.turn()) == {"WokenByRequest"}


def test_a_decision_that_was_not_carried_out_is_decided_again():
    world = SleepWorld(sleeper())
    until_asleep(world)
    world.turn()
    world.ask(world.gateways[0])
    carry_out, world.carry_out = world.carry_out, lambda _: None
    assert reasons(world.turn(1.0)) == {"WokenByRequest"}
    world.gateways[0].requests.clear()  # its client left meanwhile
    world.gateways[0].active = world.now
    world.carry_out = carry_out
    assert reasons(world.turn(1.0)) == {"WokenByRequest"}
    assert not world.asleep
    assert world.memory.sleep.short_sleeps == 1, "one sleep counts once"


def test_a_sleep_that_was_not_carried_out_ends_with_the_next_request():
    world = SleepWorld(sleeper())
    carry_out, world.carry_out = world.carry_out, lambda _: None
    while "ScaledToZero" not in reasons(world.turn()):
        pass
    assert reasons(world.turn()) == {"ScaledToZero"}
    world.ask(world.gateways[0])
    world.carry_out = carry_out
    assert "ScaledToZero" not in reasons(world.turn())
    assert not world.asleep
    assert world.memory.sleep.state == "awake"


# Pace


def test_after_a_wake_up_the_pools_stay_for_the_idle_time_from_ready_on():
    world = SleepWorld(sleeper())
    world.startup = 3 * IDLE
    until_asleep(world)
    world.turn()
    world.ask(world.gateways[0])
    world.turn(1.0)
    while world.in_flight:
        assert "ScaledToZero" not in reasons(world.turn())
    assert until_asleep(world) >= IDLE


def test_a_request_in_every_idle_time_and_a_bit_does_not_flap():
    """Each sleep would last seconds. From the second one on, the service waits longer."""
    world = SleepWorld(sleeper())
    world.startup = 1.0
    sleeps, was = 0, False
    for second in range(int(16 * (IDLE + 5))):
        if second % int(IDLE + 5) == 0:
            world.ask(world.gateways[0], seconds=0.0)
        world.turn(1.0)
        sleeps += world.asleep and not was
        was = world.asleep
    assert sleeps == 1
    assert not world.asleep
    world.ask(world.gateways[0], seconds=0.0)
    assert until_asleep(world) == pytest.approx(2 * IDLE, abs=10)
    world.advance(10 * IDLE)
    world.ask(world.gateways[0])
    world.turn()
    assert world.memory.sleep.short_sleeps == 0, "a long sleep forgives the short ones"


# Budget, ratios, node types


def test_a_wake_up_needs_no_more_than_the_budget_and_keeps_ratios():
    ratio = Ratio(Role.PREFILL, Role.DECODE, 0.5, 2.0)
    world = SleepWorld(sleeper(budget=Budget(accelerators=2), pool_ratios=(ratio,)))
    until_asleep(world)
    world.turn()
    for _ in range(20):
        world.turn()
    assert world.accelerators() == 0
    world.ask(world.gateways[0])
    found = world.turn()
    assert {item.to for item in found.values()} == {1}
    assert world.accelerators() == 2


def test_devices_of_draining_pods_delay_a_wake_up_until_they_are_gone():
    world = SleepWorld(sleeper(budget=Budget(accelerators=2)))
    world.drain = 30.0
    until_asleep(world)
    world.ask(world.gateways[0], seconds=1000.0)
    assert reasons(world.turn()) <= {"WaitingForDevices", "WokenByRequest"}
    for _ in range(12):
        world.turn()
        assert world.accelerators() <= 2
    assert {world.replicas(role) for role in world.policy.pools} == {1}


def test_a_variant_without_nodes_before_the_sleep_is_tried_again():
    world = SleepWorld(sleeper(Role.DECODE))
    world.policy = dataclasses.replace(
        world.policy, pools={Role.DECODE: pool(Role.DECODE, variant("a", startup_seconds=1.0))}
    )
    world.turn()
    world.nodes = {"a": 0}
    for item in world.pods:
        item.phase, item.created = "pending", world.now - 1e4
    until_asleep(world)
    world.turn()
    world.nodes = {}
    world.ask(world.gateways[0])
    assert world.turn()[Role.DECODE].to == 1


# Records


def test_the_record_of_each_tick_replays_and_says_why():
    """The recorded tick has the gateways' reports and what the last tick knew of the sleep."""
    world, memory, said = SleepWorld(sleeper()), Memory(), []
    for turn in range(40):
        if turn == 25:
            world.ask(world.gateways[0])
        view = world.view()
        outcome = decide(world.policy, view, memory)
        record = Record("ns/demo", world.policy, view, memory, outcome)
        again = load_record(record.dump())
        assert differences(again, replay(again)) == []
        said.append(explain(again))
        memory = outcome.memory
        world.carry_out(outcome.decisions)
        world.pass_time(5.0)
    asleep = next(text for text in said if "ScaledToZero, 1 → 0" in text)
    assert "no request for 60 s; a request at the gateway wakes the service" in asleep
    assert "next     a request at the gateway starts all pools" in asleep
    woken = next(text for text in said if "WokenByRequest, 0 → 1" in text)
    assert "a request woke the service, which was at zero for" in woken


# Laws over made-up lives


@dataclasses.dataclass
class Seen:
    """What the lives met, so that a law that was never put to the test shows."""

    sleeps: int = 0
    wakes: int = 0
    unknown: int = 0
    lost: int = 0
    answered: int = 0


def live_through(seed: int, turns: int, seen: Seen) -> None:
    rng = random.Random(seed)
    world = random_life(rng)
    for _ in range(turns):
        disturb(world, rng, seen)
        lawful_turn(world, rng, seen)
    for item in world.gateways:
        item.silent = False
    limit = world.now + 60 * IDLE
    while world.in_flight:
        world.turn(1.0)
        assert world.now < limit, "a request is never answered"
    seen.answered += len(world.answered)


def disturb(world: SleepWorld, rng: random.Random, seen: Seen) -> None:
    gateway = rng.choice(world.gateways)
    if rng.random() < 0.05:
        world.ask(gateway, seconds=rng.choice([0.5, 5.0, 15.0]))
    if rng.random() < 0.03:
        gateway.silent = not gateway.silent
    if rng.random() < 0.01:
        world.active = world.now if gateway.requests else world.active
        seen.lost += len(gateway.requests)
        world.restart(gateway)
    if rng.random() < 0.01 and len(world.gateways) > 1 and not gateway.requests:
        world.gateways.remove(gateway)
        world.gateways.append(GatewayPod(f"gateway-{rng.random()}", world.now))
    if rng.random() < 0.01:
        restart_operator(world)
    if rng.random() < 0.01:
        world.write(rng.choice(list(world.policy.pools)), "kubectl", rng.randint(0, 3))


def lawful_turn(world: SleepWorld, rng: random.Random, seen: Seen) -> None:
    before, asleep, view = world.memory, world.asleep, world.view()
    heard = {item.uid for item in world.gateways if not item.silent}
    waits = any(view.samples[uid].waiting_for_wake for uid in heard)
    idle, flying = world.now - world.active, world.in_flight
    carry_out = world.carry_out
    if rng.random() < 0.05:
        world.carry_out = lambda _: None  # the API server does not answer
    found = world.turn(1.0 if asleep else 5.0)
    world.carry_out = carry_out
    again, memory = decide_replicas(world.policy, view, world.estimate, before)
    assert (again, memory) == (found, world.memory), "planning twice plans the same"
    if asleep and waits:
        seen.wakes += 1
        assert all(item.to >= 1 for item in found.values()), found
    if not asleep and "ScaledToZero" in reasons(found):
        seen.sleeps += 1
        assert not flying
        assert len(heard) == len(world.gateways), "a gateway that is silent may have a request"
        assert idle >= world.policy.sleep.idle_seconds
    seen.unknown += len(heard) < len(world.gateways)


@given(st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_no_request_is_lost_and_no_sleep_begins_while_one_may_exist(seed):
    live_through(seed, 150, Seen())


def test_the_made_up_lives_put_every_law_to_the_test():
    seen = Seen()
    for seed in range(16):
        live_through(seed, 200, seen)
    assert min(dataclasses.astuple(seen)) > 5, seen


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_they_hold_over_many_turns():
    seen = Seen()
    for seed in range(300):
        live_through(seed, 500, seen)
