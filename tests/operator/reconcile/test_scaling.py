"""State in, state out: what turns make of a number of replicas that changes."""

from support.fakes import run_controllers
from support.load import auto, loaded_world, replicas, run
from support.world import World, body, external, pool
from vlm_operator import names
from vlm_operator.cluster import (
    DEPLOYMENT,
    EVENT,
    PDB,
    POD,
    VLM_POOL,
)


def test_a_pool_of_external_mode_follows_kubectl_scale_within_its_bounds():
    world = World(body(decode=external(1, 4)))
    world.converge()
    world.scale("decode", 3)
    world.converge()
    assert world.deployments()["demo-decode"] == 3
    world.scale("decode", 9)
    world.converge()
    assert world.deployments()["demo-decode"] == 4
    assert world.cluster.all(VLM_POOL)[0]["spec"]["replicas"] == 9
    assert "maxReplicas is 4" in world.condition("ScalingActive")["message"]


def test_a_pool_of_manual_mode_is_put_back_and_the_event_names_external():
    world = World(body(decode=pool(2)))
    world.converge()
    world.scale("decode", 5)
    world.turn()
    assert world.cluster.all(VLM_POOL)[0]["spec"]["replicas"] == 2
    assert world.deployments()["demo-decode"] == 2
    said = [item for item in world.cluster.all(EVENT) if item["reason"] == "ScalePutBack"]
    assert len(said) == 1
    assert "kubectl" in said[0]["message"]
    assert "External" in said[0]["message"]
    before = world.written()
    world.turn()
    assert world.written() == before


def test_a_deleted_pool_is_created_again_with_the_live_count():
    world = World(body(decode=external(1, 4)))
    world.converge()
    world.scale("decode", 3)
    world.converge()
    world.cluster.remove(VLM_POOL, "ns", "demo-decode")
    world.turn()
    assert world.cluster.all(VLM_POOL)[0]["spec"]["replicas"] == 3
    assert world.deployments()["demo-decode"] == 3


def test_scaling_in_closes_the_gate_and_waits_for_requests_to_end():
    world = World(body(decode=external(1, 4)))
    world.converge()
    world.scale("decode", 2)
    world.converge()
    busy = [
        item["metadata"]["name"]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    ]
    world.scraper.busy = dict.fromkeys(busy, 1)
    world.scale("decode", 1)
    for _ in range(5):
        assert world.turn(seconds=3) <= 1.0
        run_controllers(world.cluster)
    assert world.deployments()["demo-decode"] == 2  # nobody is cut off
    pod_patches = {
        item["metadata"]["name"]: gate["status"]
        for item in world.cluster.all(POD)
        for gate in item["status"]["conditions"]
        if gate["type"] == names.GATE_ACCEPTING
        and item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    }
    victim = next(name for name, status in pod_patches.items() if status == "False")
    assert sorted(pod_patches.values()) == ["False", "True"]
    world.scraper.busy[victim] = 0
    world.converge()
    left = [item["metadata"]["name"] for item in world.cluster.all(POD)]
    assert world.deployments()["demo-decode"] == 1
    assert victim not in left
    assert set(busy) - {victim} <= set(left)


def test_a_drain_that_outlasts_its_deadline_ends():
    drain = {"drain": {"timeoutSeconds": 60}}
    world = World(body(decode=external(1, 4, **drain)))
    world.converge()
    world.scale("decode", 2)
    world.converge()
    names_of = [item["metadata"]["name"] for item in world.cluster.all(POD)]
    world.scraper.busy = dict.fromkeys(names_of, 1)
    world.scale("decode", 1)
    world.turn()
    world.turn(seconds=30)
    assert world.deployments()["demo-decode"] == 2
    world.turn(seconds=31)
    assert world.deployments()["demo-decode"] == 1


def test_a_scale_up_in_the_middle_of_a_drain_opens_the_gate_again():
    world = World(body(decode=external(1, 4)))
    world.converge()
    world.scale("decode", 2)
    world.converge()
    pods = [item["metadata"]["name"] for item in world.cluster.all(POD)]
    world.scraper.busy = dict.fromkeys(pods, 1)
    world.scale("decode", 1)
    world.turn()
    assert world.status["pools"]["decode"]["desiredReplicas"] == 1
    world.scale("decode", 2)
    world.converge()
    assert world.status["pools"]["decode"]["readyReplicas"] == 2
    assert {item["metadata"]["name"] for item in world.cluster.all(POD)} == set(pods)


def test_suspend_drains_everything_and_keeps_the_status():
    world = World()
    world.converge()
    world.apply(body({"stopped": True}))
    world.converge()
    assert set(world.deployments().values()) == {0}
    assert (world.condition("Ready")["status"], world.condition("Ready")["reason"]) == (
        "True",
        "Stopped",
    )
    assert [item["spec"]["replicas"] for item in world.cluster.all(VLM_POOL)] == [1, 1, 1]
    world.apply(body())
    world.converge()
    assert world.condition("Ready")["status"] == "True"


def test_a_pool_that_shrinks_without_waiting_grows_and_shrinks():
    world = loaded_world(decode=auto(down=0))
    world.scraper.tokens = 4000
    run(world, turns=12)
    grown = replicas(world)
    assert grown > 1
    world.scraper.tokens = 0
    run(world, turns=40)
    assert replicas(world) < grown


def front(replicas: int = 1, minimum: int = 1, maximum: int = 4) -> World:
    scaling = {"minReplicas": minimum, "maxReplicas": maximum}
    spec = {"gateway": {"replicas": replicas, "scaling": scaling}}
    return World(body(spec, decode=pool()))


def test_gateways_follow_the_scale_of_their_pool_within_its_bounds():
    world = front(replicas=2)
    world.converge()
    assert gateways(world) == 2
    world.scale("gateway", 3)
    world.converge()
    assert gateways(world) == 3
    found = next(item for item in world.cluster.all(VLM_POOL) if item["spec"]["role"] == "gateway")
    assert found["status"]["replicas"] == found["status"]["readyReplicas"] == 3
    assert "triptych.dev/role=gateway" in found["status"]["selector"]
    world.scale("gateway", 9)
    world.converge()
    assert gateways(world) == 4
    assert [item["spec"]["maxUnavailable"] for item in world.cluster.all(PDB)] == [1]
    before = world.written()
    world.turn()
    assert world.written() == before


def test_a_deleted_pool_of_gateways_is_created_again_with_the_live_count():
    world = front()
    world.converge()
    world.scale("gateway", 3)
    world.converge()
    world.cluster.remove(VLM_POOL, "ns", "demo-gateway")
    world.turn()
    world.converge()
    assert gateways(world) == 3
    counts = {
        item["spec"]["role"]: item["spec"]["replicas"] for item in world.cluster.all(VLM_POOL)
    }
    assert counts["gateway"] == 3


def test_without_scaling_the_manifest_has_the_number_and_the_pool_goes():
    world = front()
    world.converge()
    world.scale("gateway", 3)
    world.converge()
    world.apply(body({"gateway": {"replicas": 2}}, decode=pool()))
    world.converge()
    assert gateways(world) == 2
    assert [item["spec"]["role"] for item in world.cluster.all(VLM_POOL)] == ["decode"]


def test_a_stopped_service_has_no_gateways_whatever_the_scale():
    world = front()
    world.converge()
    scaling = {"minReplicas": 1, "maxReplicas": 4}
    spec = {"stopped": True, "gateway": {"scaling": scaling}}
    world.apply(body(spec, decode=pool()))
    world.converge()
    world.scale("gateway", 3)
    world.converge()
    assert gateways(world) == 0


def gateways(world: World) -> int:
    return sum(
        item["spec"]["replicas"]
        for item in world.cluster.all(DEPLOYMENT)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "gateway"
    )
