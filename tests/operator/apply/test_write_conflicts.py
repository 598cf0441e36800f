"""Edits by others are reverted; the delay grows while one writer repeats its edit."""

from __future__ import annotations

import itertools

from support.world import World, body, kstatus, pool, rps
from vlm_operator.apply.sync_state import (
    FORGOTTEN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    REPAIRS_AT_ONCE,
    WriteConflicts,
    current,
    due,
    newly_contested,
    repaired,
)
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, EVENT, SERVICE, VLM_SERVICE, Manifest

KEY = ("Service", "demo-gateway")


def fight(*, seconds: float, every: float = 1.0) -> tuple[WriteConflicts, list[float]]:
    """An opponent that looks `every` so often; returns the times at which we repaired."""
    found: WriteConflicts = {}
    times = []
    now = 0.0
    while now < seconds:
        if due(found, KEY, now=now) == 0:
            found = repaired(found, KEY, ".spec", now=now)
            times.append(now)
        now += every
    return found, times


def test_the_first_repairs_are_at_once_and_then_ever_further_apart():
    _, times = fight(seconds=4000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[: REPAIRS_AT_ONCE - 1] == [1.0] * (REPAIRS_AT_ONCE - 1)
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_PAUSE_SECONDS
    assert len(times) < 30, "4000 edits"


def test_edits_now_and_then_are_no_fight():
    found, times = fight(seconds=3600, every=60.0)
    assert len(times) == 60
    assert newly_contested({}, found) == ()


def test_what_is_left_alone_for_long_enough_is_repaired_at_once_again():
    found, times = fight(seconds=100)
    assert due(found, KEY, now=times[-1] + 1) > 0
    assert current(found, now=times[-1] + FORGOTTEN_SECONDS) == {}
    again = repaired(found, KEY, ".spec", now=times[-1] + FORGOTTEN_SECONDS)
    assert not again[KEY].contested


def test_a_fight_is_said_once():
    found: WriteConflicts = {}
    said = []
    for now in range(500):
        if due(found, KEY, now=now) == 0:
            after = repaired(found, KEY, ".spec.ports[0].port", now=now)
            said += newly_contested(found, after)
            found = after
    assert said == [
        "Service demo-gateway: another writer keeps changing spec.ports[0].port; "
        "the operator restores it less and less often"
    ]


def port(world: World) -> int:
    found = {item["metadata"]["name"]: item for item in world.cluster.all(SERVICE)}
    return int(found["demo-gateway"]["spec"]["ports"][0]["port"])


def break_port(item: Manifest) -> None:
    item["spec"]["ports"][0]["port"] = 81


def test_an_edited_and_a_deleted_child_are_repaired_in_the_next_turn():
    world = World(body(decode=pool(1)))
    world.converge()
    wanted = world.snapshot()
    world.cluster.edit(SERVICE, "ns", "demo-gateway", break_port)
    deployment = world.cluster.all(DEPLOYMENT)[0]["metadata"]["name"]
    world.cluster.edit(DEPLOYMENT, "ns", deployment, lambda item: item["spec"].update(replicas=9))
    world.cluster.remove(CONFIG_MAP, "ns", "demo-gateway")
    assert world.snapshot() != wanted
    world.turn()
    assert world.snapshot() == wanted


def test_a_restart_of_a_child_is_put_back_and_names_the_annotation_of_the_service():
    world = World(body(decode=pool(1)))
    world.converge()
    wanted = world.snapshot()
    stamp = {"kubectl.kubernetes.io/restartedAt": "2026-11-23T12:00:00Z"}

    def restart(item: Manifest) -> None:
        meta = item["spec"]["template"]["metadata"]
        meta["annotations"] = {**(meta.get("annotations") or {}), **stamp}

    name = world.cluster.all(DEPLOYMENT)[0]["metadata"]["name"]
    world.cluster.edit(DEPLOYMENT, "ns", name, restart, manager="kubectl-rollout")
    assert world.snapshot() != wanted
    world.turn()
    assert world.snapshot() == wanted
    (event,) = [item for item in world.cluster.all(EVENT) if item["reason"] == "ChildRepaired"]
    assert "annotate the VLMService with triptych.dev/restarted-at" in event["message"]


def test_another_controller_that_fights_is_backed_off_from_with_one_event():
    world = World(body(decode=pool(1)))
    world.converge()
    before = world.written()
    for _ in range(60):
        if port(world) == 80:
            world.cluster.edit(SERVICE, "ns", "demo-gateway", break_port, manager="rival")
        world.turn(seconds=3.0)
    repairs = [write for write in world.cluster.writes[before:] if write[1] == "Service"]
    assert REPAIRS_AT_ONCE < len(repairs) < 2 * (REPAIRS_AT_ONCE + 6)  # merge and apply
    events = [item for item in world.cluster.all(EVENT) if item["reason"] == "ChildContested"]
    assert [item["count"] for item in events] == [1]
    assert "spec.ports[0].port" in events[0]["message"]
    # our own changes do not wait for the fight
    world.apply(body({"gateway": {"service": {"port": 8080}}}, decode=pool(1)))
    world.turn()
    assert port(world) == 8080


def test_a_child_that_is_changed_for_ten_minutes_needs_a_person_and_the_service_serves_on():
    world = World(body(decode=pool(1)))
    world.converge()
    for number in range(130):
        world.cluster.edit(SERVICE, "ns", "demo-gateway", break_port, manager="rival")
        world.turn(seconds=5.0)
        if number < 100:
            assert rps(world) == "T/F/F"
    assert (rps(world), kstatus(world.cluster.all(VLM_SERVICE)[0])) == ("T/F/T", "Failed")
    stalled = world.condition("Stalled")
    assert stalled["reason"] == "ChildContested"
    assert "Service demo-gateway" in stalled["message"]


def test_a_child_that_is_deleted_again_and_again_is_a_fight_too():
    world = World(body(decode=pool(1)))
    world.converge()
    before = world.written()
    for _ in range(40):
        if any(i["metadata"]["name"] == "demo-gateway" for i in world.cluster.all(CONFIG_MAP)):
            world.cluster.remove(CONFIG_MAP, "ns", "demo-gateway")
        world.turn(seconds=1.0)
    made = [write for write in world.cluster.writes[before:] if write[1] == "ConfigMap"]
    assert REPAIRS_AT_ONCE < len(made) < 12
