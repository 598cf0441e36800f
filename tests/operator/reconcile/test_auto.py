"""State in, state out: what turns make of pools in mode Auto."""

import contextlib
import dataclasses
import json

import pytest

from support.fakes import Died, DyingCluster, run_controllers
from support.load import FAST, QUICK, SLO, auto, loaded_world, replicas, run, said, seen
from support.world import World, body, pool
from vlm_operator.autoscale.record import differences, read_log, replay
from vlm_operator.cluster import CONFIG_MAP, EVENT, VLM_POOL, VLM_SERVICE
from vlm_operator.names import Role
from vlm_operator.reconcile.report import MEMORY_SECONDS

SOON_MISSING = dataclasses.replace(QUICK, missing_seconds=20.0)


def test_a_full_decode_pool_grows_says_why_and_shrinks_when_it_is_empty_for_the_window():
    world = loaded_world()
    world.scraper.tokens = 1900
    run(world, turns=3)
    assert replicas(world) == world.deployments()["demo-decode"] == 3
    decision = said(world)["lastDecision"]
    assert (decision["from"], decision["to"]) == (1, 3)
    assert decision["reason"] == "ScaleUp"
    assert {item["signal"] for item in decision["candidates"]}
    events = [item["message"] for item in world.cluster.all(EVENT) if item["reason"] == "ScaledUp"]
    assert len(events) == 1
    assert events[0].startswith("decode from 1 to 3: ")
    world.scraper.tokens = 0
    run(world, turns=8)
    assert replicas(world) == 3, "one whole window has to say less"
    run(world, turns=30)
    assert replicas(world) == world.deployments()["demo-decode"] == 1
    assert said(world)["lastDecision"]["to"] == 1
    assert said(world)["history"][0]["to"] == 3 or len(said(world)["history"]) > 1


def test_an_idle_service_of_mode_auto_writes_nothing():
    world = loaded_world()
    run(world, turns=12)
    before = world.written()
    run(world, turns=120)
    assert world.cluster.writes[before:] == []


def test_a_steady_load_writes_nothing_but_the_memory_now_and_then():
    world = loaded_world()
    world.scraper.tokens = 1500
    run(world, turns=40)
    before = world.written()
    run(world, turns=60)
    kinds = {item[1] for item in world.cluster.writes[before:]}
    assert kinds <= {"ConfigMap"}


def test_the_number_of_a_pool_is_written_by_the_autoscaler_alone():
    world = loaded_world()
    world.scraper.tokens = 1900
    run(world, turns=3)
    (found,) = world.cluster.all(VLM_POOL)
    owners = [
        item["manager"]
        for item in found["metadata"]["managedFields"]
        if "f:replicas" in item["fieldsV1"].get("f:spec", {})
    ]
    assert owners == ["vlm-autoscaler"]


def test_a_new_process_knows_what_was_decided_and_shrinks_nothing_for_a_window():
    world = loaded_world()
    world.scraper.tokens = 1900
    run(world, turns=12)
    assert replicas(world) == 3
    history = said(world)["lastDecision"]
    stored = [
        i for i in world.cluster.all(CONFIG_MAP) if i["metadata"]["name"] == "demo-autoscaler"
    ]
    assert json.loads(stored[0]["data"]["memory.json"])["version"] == 4
    world.loop = world.new_loop()
    world.scraper.tokens = 0
    run(world, turns=8)
    assert replicas(world) == 3
    assert said(world)["lastDecision"] == history


def test_every_decision_is_remembered_at_once():
    world = loaded_world(decode=auto(1, 8))
    began, sizes = world.cluster.clock.now, set()
    for tokens in (1900, 4500):
        world.scraper.tokens = tokens
        run(world, turns=2)
        found = {i["metadata"]["name"]: i for i in world.cluster.all(CONFIG_MAP)}
        stored = json.loads(found["demo-autoscaler"]["data"]["memory.json"])
        remembered = stored["pace"]["pools"]["decode"]
        assert remembered["decisions"][-1]["to"] == replicas(world)
        sizes.add(replicas(world))
    assert len(sizes) == 2
    assert world.cluster.clock.now - began < MEMORY_SECONDS


@pytest.mark.parametrize("policy", ["Advisory", "Off"])
def test_what_is_not_active_changes_nothing_and_says_so(policy):
    world = loaded_world({"autoscaling": {**FAST, "policy": policy}})
    world.scraper.tokens = 1900
    run(world, turns=6)
    assert replicas(world) == world.deployments()["demo-decode"] == 1
    active = world.condition("ScalingActive")
    assert (active["status"], active["reason"]) == ("False", policy)
    if policy == "Advisory":
        assert said(world)["recommendation"] == 3


def test_a_paused_service_is_sized_on_paper_only():
    world = loaded_world()
    world.apply(
        body(
            {"slo": SLO, "autoscaling": FAST, "paused": True},
            decode=auto(),
        )
    )
    world.turn()
    world.scraper.tokens = 1900
    before = world.written()
    run(world, turns=10)
    assert {item[1] for item in world.cluster.writes[before:]} <= {"VLMService", "Event"}
    assert replicas(world) == 1


def test_a_second_writer_is_a_conflict_and_is_not_overwritten():
    world = loaded_world()
    world.scale("decode", 3)
    run(world, turns=2)
    assert replicas(world) == world.deployments()["demo-decode"] == 3
    world.scale("decode", 4)
    run(world, turns=2)
    active = world.condition("ScalingActive")
    assert (active["status"], active["reason"]) == ("False", "ScalingConflict")
    assert "kubectl keeps writing VLMPool" in active["message"]
    assert [i["reason"] for i in world.cluster.all(EVENT)].count("ScalingConflict") == 1
    assert replicas(world) == 4


def test_silent_pods_change_nothing_and_are_no_idle_ones():
    world = loaded_world()
    world.scraper.tokens = 1900
    run(world, turns=12)
    assert replicas(world) == 3
    world.scraper.silent = {pod.name for pod in seen(world) if pod.role is Role.DECODE}
    run(world, turns=60)
    assert replicas(world) == 3
    metrics = world.condition("MetricsAvailable")
    assert (metrics["status"], metrics["reason"]) == ("False", "PodsSilent")


def test_after_long_silence_the_fallback_is_held():
    scaling = {**FAST, "missingMetrics": "Fallback", "fallbackReplicas": {"decode": 2}}
    world = loaded_world({"autoscaling": scaling}, SOON_MISSING)
    world.scraper.silent = {pod.name for pod in seen(world) if pod.role is Role.DECODE}
    run(world, turns=12)
    assert replicas(world) == 2
    assert said(world)["lastDecision"]["reason"] == "Fallback"


def test_an_encoder_at_zero_wakes_for_a_held_request_and_goes_when_none_comes():
    zero = auto(0, 2, down=10)
    zero["scaling"]["scaleToZero"] = {"idleSeconds": 20, "whileAtZero": "Queue"}
    world = loaded_world({"slo": SLO | {"windowSeconds": 10}}, encoder=zero, decode=pool())
    run(world, turns=12)
    assert replicas(world, "encoder") == 0
    assert world.condition("Ready")["status"] == "True"
    before = world.written()
    run(world, turns=24)
    assert world.cluster.writes[before:] == []
    assert world.turn() <= 1.0, "a held request will be seen within a second"
    world.scraper.held = 1
    run(world, turns=3)
    assert replicas(world, "encoder") == 1
    assert said(world, "encoder")["lastDecision"]["reason"] == "Wake"
    world.scraper.held = 0
    run(world, turns=40)
    assert replicas(world, "encoder") == 0
    assert said(world, "encoder")["lastDecision"]["reason"] == "Idle"


def test_the_logged_record_of_a_decision_replays_to_the_bit(caplog):
    world = loaded_world()
    world.scraper.tokens = 1900
    caplog.set_level("INFO")
    run(world, turns=3)
    lines = [
        json.dumps({"record": item.record})
        for item in caplog.records
        if item.message == "decision record"
    ]
    assert max(map(len, lines)) < 16_000
    moved = [record for _, record in read_log(lines) if record.changes_something]
    assert len(moved) == 1
    words = [item.decided["decode"] for item in caplog.records if item.message == "decision"]
    assert any(text.startswith("1 → 3 ") for text in words)
    assert moved[0].service == "ns/demo"
    assert differences(moved[0], replay(moved[0])) == []


def test_a_service_of_manual_pools_logs_its_numbers_and_no_record(caplog):
    world = World(body(encoder=pool(), decode=pool(2)))
    caplog.set_level("INFO")
    run(world, turns=3)
    (line,) = [item for item in caplog.records if item.message == "decision"]
    assert set(line.decided) == {"encoder", "decode"}
    assert [item for item in caplog.records if item.message == "decision record"] == []


def test_the_log_is_silent_while_the_same_is_decided(caplog):
    world = loaded_world()
    run(world, turns=30)
    caplog.set_level("INFO")
    run(world, turns=30)
    assert [item for item in caplog.records if item.message == "decision"] == []


def test_a_suspended_service_keeps_its_numbers_and_is_not_written_however_long():
    missing = {"missingMetrics": "Fallback", "fallbackReplicas": {"decode": 4}}
    world = loaded_world({"autoscaling": {**FAST, **missing}}, SOON_MISSING)
    world.scraper.tokens = 1900
    run(world, turns=4)
    assert replicas(world) == 3
    world.scraper.tokens = 0
    world.apply(body({**world.cluster.all(VLM_SERVICE)[0]["spec"], "stopped": True}))
    run(world, turns=20)
    before = world.written()
    run(world, turns=60)
    assert world.cluster.writes[before:] == []
    assert replicas(world) == 3
    assert world.deployments()["demo-decode"] == 0


def test_growth_converges_from_a_death_at_every_write():
    at = 0
    while True:
        world = loaded_world()
        world.scraper.tokens = 1900
        world.loop = world.new_loop(DyingCluster(world.cluster, at=at, committed=at % 2 == 0))
        with contextlib.suppress(Died):
            run(world, turns=4)
            break
        run_controllers(world.cluster)
        world.loop = world.new_loop()
        run(world, turns=6)
        assert replicas(world) == world.deployments()["demo-decode"] == 3, f"died at write {at}"
        assert said(world)["readyReplicas"] == 3
        at += 1
    assert at > 4
