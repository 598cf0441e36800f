"""State in, state out: what turns of the loop make of a cluster."""

import asyncio
import copy
import dataclasses

import pytest

from support.fakes import run_controllers
from support.world import World, body, pool
from vlm_operator import names
from vlm_operator.cluster import (
    CHILD_KINDS,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    PDB,
    POD,
    SERVICE,
    VLM_POOL,
    VLM_SERVICE,
)
from vlm_operator.reconcile.decisions import Options
from vlm_operator.state import Resolved


def test_a_new_service_gets_everything_it_needs():
    world = World()
    world.turn()
    kinds = {(item[1], item[2]) for item in world.cluster.writes}
    roles = ("encoder", "prefill", "decode", "gateway")
    for role in roles:
        assert ("ServiceAccount", f"demo-{role}") in kinds
        assert ("NetworkPolicy", f"demo-{role}") in kinds
        assert ("Service", f"demo-{role}") in kinds
    assert world.deployments() == {
        "demo-encoder": 1,
        "demo-prefill": 1,
        "demo-decode": 1,
        "demo-gateway": 1,
    }
    assert {
        item["metadata"]["name"]: item["spec"]["replicas"] for item in world.cluster.all(VLM_POOL)
    } == {
        "demo-decode": 1,
        "demo-encoder": 1,
        "demo-prefill": 1,
    }


def test_ready_is_said_once_every_role_serves_and_then_nothing_is_written():
    world = World()
    world.converge()
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Reconciling")["status"] == "False"
    assert world.status["summary"] == {
        "encoder": "1/1",
        "prefill": "1/1",
        "decode": "1/1",
        "kvOccupancyPercent": "0",
    }
    before = world.written()
    for _ in range(20):
        world.turn(seconds=5)
    assert world.cluster.writes[before:] == []


def test_the_message_names_the_one_thing_that_blocks():
    world = World(body(decode=pool(2)))
    world.turn()
    run_controllers(world.cluster, start=False)
    scheduler = (
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are "
        "available: 3 No preemption victims found."
    )
    for item in world.cluster.all(POD):
        if item["metadata"]["labels"][names.LABEL_ROLE] != "decode":
            continue
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "message": scheduler,
            "lastTransitionTime": world.cluster.clock.stamp(),
        }
        name = item["metadata"]["name"]

        def change(pod, condition=condition):
            limits = {"limits": {"nvidia.com/gpu": "1"}}
            pod["spec"]["containers"][0]["resources"] = limits
            pod["status"] = {"phase": "Pending", "conditions": [condition]}

        world.cluster.edit(POD, "ns", name, change)
    world.turn()
    message = world.condition("DecodeReady")["message"]
    assert message.startswith("decode 0/2: pod demo-decode-default-")
    assert "no node with 1 free nvidia.com/gpu (3 checked); add nodes" in message
    assert world.condition("CapacitySufficient")["status"] == "False"


@pytest.mark.parametrize("kind", [DEPLOYMENT, SERVICE, CONFIG_MAP, PDB, VLM_POOL])
def test_a_deleted_child_is_created_again(kind):
    world = World(body(decode=pool(2)))
    world.converge()
    before = world.snapshot()
    name = world.cluster.all(kind, labels={names.LABEL_SERVICE: "demo"})[0]["metadata"]["name"]
    world.cluster.remove(kind, "ns", name)
    assert world.snapshot() != before
    world.turn()
    assert world.snapshot() == before


# a Job that filled a deleted claim ends first: see test_model_cache.py
@pytest.mark.parametrize("kind", [kind for kind in CHILD_KINDS if kind != CLAIM])
def test_a_turn_leaves_nothing_to_the_next(kind):
    # the echo of our own writes wakes nobody: what is left over would wait for the next tick
    model = {"uri": "hf://org/name", "revision": "a" * 40, "cache": {"claim": {"size": "1Gi"}}}
    world = World(body({"model": model} if kind == JOB else {}, decode=pool(2)))
    world.turn()
    before = world.written()
    world.turn()
    assert world.cluster.writes[before:] == []
    world.converge()
    name = world.cluster.all(kind, labels={names.LABEL_SERVICE: "demo"})[0]["metadata"]["name"]
    world.cluster.remove(kind, "ns", name)
    world.turn()
    before = world.written()
    world.turn()
    assert world.cluster.writes[before:] == []


def test_an_edited_child_is_restored():
    world = World()
    world.converge()
    before = world.snapshot()
    name = world.cluster.all(DEPLOYMENT)[0]["metadata"]["name"]

    def edit(item):
        item["spec"]["replicas"] = 7
        item["spec"]["template"]["spec"]["containers"][0]["image"] = "other:1"

    world.cluster.edit(DEPLOYMENT, "ns", name, edit)
    world.turn()
    assert world.snapshot() == before


def test_an_object_of_another_owner_is_never_adopted():
    world = World()
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo-gateway", "namespace": "ns"},
        "spec": {"ports": [{"port": 1}]},
    }
    world.cluster.hardware(copy.deepcopy(theirs))
    world.turn()
    found = next(i for i in world.cluster.all(SERVICE) if i["metadata"]["name"] == "demo-gateway")
    assert found["spec"] == theirs["spec"]
    assert "ownerReferences" not in found["metadata"]
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "NameConflict")
    assert "Service demo-gateway has no owner" in stalled["message"]
    world.cluster.remove(SERVICE, "ns", "demo-gateway")
    world.converge()
    assert world.condition("Stalled")["status"] == "False"


def test_paused_writes_nothing_but_the_status_and_gates():
    world = World()
    world.converge()
    world.apply(body({"paused": True}))
    world.cluster.edit(DEPLOYMENT, "ns", "demo-gateway", lambda i: i["spec"].update(replicas=3))
    before = world.written()
    world.turn()
    assert {item[1] for item in world.cluster.writes[before:]} <= {"VLMService", "Event"}
    assert world.condition("ScalingActive")["reason"] == "Paused"


def test_a_new_revision_serves_before_the_old_one_goes():
    world = World()
    world.converge()
    old = {item.name for item in world.states()}
    spec = {"model": {"uri": "pvc://shapes", "dtype": "Float32"}}
    world.apply(body(spec))
    world.turn()
    both = {item.name: item.desired for item in world.states()}
    assert old < set(both)
    assert set(both.values()) == {1}
    assert world.condition("RolloutProgressing")["status"] == "True"
    assert world.status["currentRevision"] != world.status["updateRevision"]
    world.converge()
    assert not old & {item.name for item in world.states()}
    assert len(world.states()) == 3
    assert world.status["currentRevision"] == world.status["updateRevision"]
    assert world.condition("Ready")["status"] == "True"


def test_one_role_rolls_alone_where_the_others_stay_compatible():
    world = World()
    world.converge()
    before = {item.role: item.name for item in world.states()}
    pools = {role: pool() for role in names.POOL_ROLES}
    pools["decode"]["engine"] = {"extraArgs": ["--max-requests=8"]}
    world.apply(body(**pools))
    world.converge()
    after = {item.role: item.name for item in world.states()}
    assert [role for role in before if before[role] != after[role]] == [names.Role.DECODE]


def test_an_operator_with_another_default_image_restarts_nothing():
    world = World(worker_image="worker:1")
    world.converge()
    before = world.snapshot()
    for later in (
        Options(worker_image="worker:2"),
        Options(worker_image="worker:1", gateway_image="gateway:1"),
    ):
        world.loop = world.new_loop(options=later)
        world.turn()
        world.turn()
        assert world.snapshot() == before


def test_an_operator_with_another_gateway_image_restarts_nothing():
    world = World(worker_image="worker:1", gateway_image="gateway:1")
    world.converge()
    images = {role: image_of(world, role) for role in (names.Role.GATEWAY, names.Role.DECODE)}
    assert images == {names.Role.GATEWAY: "gateway:1", names.Role.DECODE: "worker:1"}
    before = world.snapshot()
    world.loop = world.new_loop(options=Options(worker_image="worker:1", gateway_image="gateway:2"))
    world.turn()
    world.turn()
    assert world.snapshot() == before


def test_a_service_image_is_that_of_its_gateway_too():
    world = World(body({"image": "mine:1"}), gateway_image="gateway:1")
    world.converge()
    assert image_of(world, names.Role.GATEWAY) == image_of(world, names.Role.DECODE) == "mine:1"


def image_of(world: World, role: names.Role) -> str:
    (deployment,) = (
        item
        for item in world.cluster.all(DEPLOYMENT)
        if item["metadata"]["labels"][names.LABEL_ROLE] == role
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container["image"]


def test_a_longer_drain_timeout_restarts_nothing():
    world = World(body(decode=pool()))
    world.converge()
    before = {item.name for item in world.states()}
    world.apply(body(decode=pool(drain={"timeoutSeconds": 5})))
    world.converge()
    assert {item.name for item in world.states()} == before


def test_the_encoder_pool_leaves_only_after_prefill_encodes():
    world = World()
    world.converge()
    world.apply(body(prefill=pool(), decode=pool()))
    world.turn()
    roles = [item.role.value for item in world.states()]
    assert roles.count("encoder") == 1
    assert roles.count("prefill") == 2
    world.converge()
    assert sorted(item.role.value for item in world.states()) == ["decode", "prefill"]
    assert world.status["topology"] == "PrefillDecode"
    assert [item["metadata"]["name"] for item in world.cluster.all(VLM_POOL)] == [
        "demo-decode",
        "demo-prefill",
    ]


def test_a_bad_manifest_corrected_reaches_the_state_of_one_that_was_never_bad():
    reference = World()
    reference.converge()
    world = World(body(decode={"scaling": {"mode": "Manual"}}))
    world.turn()
    accepted = world.condition("Accepted")
    assert accepted["status"] == "False"
    assert accepted["message"].startswith("spec.pools.decode.scaling.replicas: ")
    assert world.cluster.all(DEPLOYMENT) == []
    world.apply(body())
    world.converge()
    assert world.snapshot() == reference.snapshot()


def test_a_bad_manifest_leaves_what_serves_alone():
    world = World()
    world.converge()
    before = world.snapshot()
    world.apply(body(decode={"scaling": {"mode": "Manual"}}))
    world.turn()
    assert world.condition("Accepted")["status"] == "False"
    after = world.snapshot()
    after.pop(("VLMService", "demo"))
    before.pop(("VLMService", "demo"))
    assert after == before


def test_a_turn_without_a_wake_reads_no_objects_but_asks_the_pods():
    world = World()
    world.converge()
    asked = world.scraper.asked
    seen = world.loop._seen
    assert seen is not None
    asyncio.run(world.loop.turn(woken=False))
    assert world.scraper.asked == asked + 1
    assert world.loop._seen is seen


def test_a_service_that_is_gone_is_ignored():
    world = World()
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo", lambda item: item["metadata"].update(finalizers=[])
    )
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    world.turn()
    assert world.cluster.writes == []


def test_an_annotation_of_a_later_version_is_read_without_its_new_fields():
    stored = Resolved("b", "worker:1", 64, "c", 5, gateway_image="gateway:1")
    later = stored.text().replace('"base"', '"later": 1, "base"')
    assert Resolved.parse(later) == Resolved.parse(stored.text()) == stored
    assert "gateway_image" not in dataclasses.replace(stored, gateway_image=None).text()
    assert [Resolved.parse(text) for text in ("", "[]", "1", '{"base": 1}')] == [None] * 4
