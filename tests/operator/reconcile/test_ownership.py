"""A label is a claim that anybody can make: only what a service controls counts."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes import run_controllers
from support.world import World, body, pool
from vlm_operator import names
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, EVENT, POD, VLM_POOL, VLM_SERVICE, Manifest
from vlm_operator.names import Role
from vlm_operator.state.owners import is_pod_of


def one(world: World, role: str) -> Manifest:
    return next(
        item
        for item in world.cluster.all(DEPLOYMENT)
        if item["metadata"]["labels"][names.LABEL_ROLE] == role
    )


def bare_pod(name: str, role: str = "decode") -> Manifest:
    """A pod that anybody may create, ready and with our labels."""
    labels = {names.LABEL_SERVICE: "demo", names.LABEL_ROLE: role, names.LABEL_VARIANT: "default"}
    return {
        "apiVersion": POD.api_version,
        "kind": POD.kind,
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "spec": {"containers": [{"name": "worker", "image": "theirs"}]},
    }


def foreign(manifest: Manifest, name: str) -> Manifest:
    """A copy of an object as `kubectl get -o yaml | kubectl apply` makes it."""
    found = copy.deepcopy(manifest)
    found["metadata"] = {
        "name": name,
        "namespace": "ns",
        "labels": manifest["metadata"]["labels"],
        "annotations": manifest["metadata"].get("annotations", {}),
    }
    found.pop("status", None)
    return found


def events(world: World, reason: str) -> list[str]:
    found = (item for item in world.cluster.all(EVENT) if item["reason"] == reason)
    return [item["message"] for item in found]


@pytest.mark.parametrize("labels", [{}, {names.LABEL_ROLE: "none"}], ids=["no role", "unknown"])
def test_a_foreign_deployment_with_our_label_stops_nothing(labels: dict[str, str]):
    world = World()
    world.converge()
    before = world.snapshot()
    theirs = foreign(one(world, "decode"), "theirs")
    theirs["metadata"]["labels"] = {names.LABEL_SERVICE: "demo", **labels}
    theirs["spec"]["selector"] = {"matchLabels": {"app": "theirs"}}
    theirs["spec"]["template"]["metadata"]["labels"] = {"app": "theirs"}
    world.cluster.hardware(theirs)
    world.turn()
    world.cluster.remove(DEPLOYMENT, "ns", "theirs")
    assert world.snapshot() == before


def test_a_copy_of_a_deployment_of_ours_has_no_part_in_the_arithmetic():
    world = World(body(decode=pool(2)))
    world.converge()
    decode = one(world, "decode")
    copied = foreign(decode, "copied")
    copied["spec"]["replicas"] = 3
    world.cluster.hardware(copied)
    run_controllers(world.cluster)
    for _ in range(3):
        world.turn()
        run_controllers(world.cluster)
    found = {item["metadata"]["name"]: item for item in world.cluster.all(DEPLOYMENT)}
    assert found["copied"]["spec"]["replicas"] == 3, "it is nobody's to change"
    assert found[decode["metadata"]["name"]]["spec"]["replicas"] == 2
    assert world.status["pools"]["decode"]["readyReplicas"] == 2
    (pool_status,) = (item["status"] for item in world.cluster.all(VLM_POOL))
    assert pool_status["replicas"] == 2
    (message,) = events(world, "ForeignObject")
    assert "Deployment copied" in message
    assert "Pod copied-0" in message


@pytest.mark.parametrize("part", ["state", "autoscaler"])
def test_a_users_config_map_of_a_name_that_we_keep_stays_theirs(part: str):
    auto = {"scaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": 2}}
    world = World(body({"slo": {"ttftP95Milliseconds": 500}}, decode=auto))
    theirs = {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": f"demo-{part}", "namespace": "ns"},
        "data": {"theirs": "kept"},
    }
    world.cluster.hardware(theirs)
    for _ in range(6):
        world.turn(seconds=5.0)
        run_controllers(world.cluster)
    found = next(
        item for item in world.cluster.all(CONFIG_MAP) if item["metadata"]["name"] == f"demo-{part}"
    )
    assert found["data"] == {"theirs": "kept"}
    assert "ownerReferences" not in found["metadata"], "it would go with the service"
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "NameConflict")
    assert f"ConfigMap demo-{part} has no owner" in stalled["message"]
    world.cluster.remove(CONFIG_MAP, "ns", f"demo-{part}")
    for _ in range(3):
        world.turn(seconds=5.0)
    assert world.condition("Stalled")["status"] == "False"


def test_a_bare_pod_is_no_replica_and_is_named():
    world = World(body(decode=pool(1)))
    world.converge(start=False)  # the real pod finds no node
    world.cluster.hardware(bare_pod("impostor"))
    run_controllers(world.cluster, start=lambda pod: pod["metadata"]["name"] == "impostor")
    world.turn()
    assert world.condition("DecodeReady")["status"] != "True"
    (found,) = (item["status"] for item in world.cluster.all(VLM_POOL))
    assert (found["replicas"], found["readyReplicas"]) == (1, 0)
    (message,) = events(world, "ForeignObject")
    assert message.startswith("Pod impostor: labelled triptych.dev/service=demo")
    pod_patches = [
        item
        for item in next(
            pod for pod in world.cluster.all(POD) if pod["metadata"]["name"] == "impostor"
        )["status"]["conditions"]
        if item["type"] == names.GATE_ACCEPTING
    ]
    assert not pod_patches, "it is told nothing"


def test_a_foreign_object_is_named_once():
    world = World(body(decode=pool(1)))
    world.cluster.hardware(bare_pod("impostor"))
    world.converge()
    for _ in range(3):
        world.turn(seconds=700)
    (found,) = (item for item in world.cluster.all(EVENT) if item["reason"] == "ForeignObject")
    assert found["count"] == 1


def test_a_deployment_of_ours_that_lost_its_role_label_gets_it_back():
    world = World()
    world.converge()
    before = world.snapshot()
    name = one(world, "decode")["metadata"]["name"]
    world.cluster.edit(
        DEPLOYMENT, "ns", name, lambda item: item["metadata"]["labels"].pop(names.LABEL_ROLE)
    )
    world.converge()
    assert world.snapshot() == before


def test_pods_of_a_gateway_that_was_deleted_still_hold_up_the_end_of_the_service():
    world = World()
    world.converge()
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    pods = [
        item
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "gateway"
    ]
    assert pods
    # the Deployment and its ReplicaSet are gone, garbage collection has not reached the pods
    ours: frozenset[str] = frozenset()
    assert all(is_pod_of(pod, "demo", ours=ours, foreign=ours) for pod in pods)


WORDS = st.from_regex(r"[a-z]([a-z-]{0,18}[a-z])?", fullmatch=True)


@given(st.sets(st.tuples(WORDS, st.sampled_from(names.POOL_ROLES), WORDS), min_size=2))
def test_two_services_never_share_a_deployments_name(many: set[tuple[str, Role, str]]):
    found = {names.deployment(*one, "1a2b3c4d") for one in many}
    assert len(found) == len(many)


def test_services_whose_names_read_alike_live_side_by_side():
    variants = {"z": "decode-v", "z-decode": "v"}
    read = {f"{service}-decode-{variant}" for service, variant in variants.items()}
    assert len(read) == 1
    found = {
        names.deployment(*pair, "95b71613")
        for pair in (("z", "decode", "decode-v"), ("z-decode", "decode", "v"))
    }
    assert len(found) == 2


def test_a_deployment_with_a_name_of_an_earlier_version_keeps_it_and_its_pods():
    """What 0.1 made, in the hands of this version."""
    world = World(body(decode=pool(2)))
    world.converge()
    live = one(world, "decode")
    labels = live["metadata"]["labels"]
    former = names.former_deployment(
        "demo", "decode", labels[names.LABEL_VARIANT], labels[names.LABEL_REVISION]
    )
    older = foreign(live, former)
    older["metadata"]["ownerReferences"] = live["metadata"]["ownerReferences"]
    world.cluster.remove(DEPLOYMENT, "ns", live["metadata"]["name"])
    world.cluster.hardware(older)
    run_controllers(world.cluster)
    run_controllers(world.cluster)
    before = {item["metadata"]["uid"] for item in world.cluster.all(POD)}
    world.loop = world.new_loop()
    world.converge()
    assert one(world, "decode")["metadata"]["name"] == former
    assert {item["metadata"]["uid"] for item in world.cluster.all(POD)} == before

    world.apply(body(decode=pool(2, engine={"extraArgs": ["--new"]})))
    world.converge(turns=40)
    (found,) = (
        item["metadata"]["name"]
        for item in world.cluster.all(DEPLOYMENT)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    )
    revision = one(world, "decode")["metadata"]["labels"][names.LABEL_REVISION]
    assert found == names.deployment("demo", "decode", "default", revision)
