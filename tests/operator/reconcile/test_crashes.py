"""What is left of a service that goes, and of a turn that the API server refuses."""

import asyncio
import contextlib

import pytest

from support.fakes import DyingCluster
from support.world import World, body, pause, pool, rps
from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, POD, VLM_SERVICE
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError


def spec() -> dict:
    return body(encoder=pool(), decode=pool(2))


def reference() -> World:
    world = World(spec())
    world.converge()
    return world


def test_a_deleted_service_waits_for_its_gateways_and_not_for_ever():
    world = reference()
    gateway = next(
        item["metadata"]["name"]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "gateway"
    )
    # a pod that takes its time: something holds it
    world.cluster.edit(
        POD, "ns", gateway, lambda item: item["metadata"].update(finalizers=["test/hold"])
    )
    world.scraper.busy[gateway] = 3
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    loop = world.new_loop()
    assert pause(asyncio.run(loop.turn())) == 1.0
    assert world.condition("Ready")["message"] == (
        "1 gateway pods finish the requests that they have"
    )
    assert "demo-gateway" not in [i["metadata"]["name"] for i in world.cluster.all(DEPLOYMENT)]
    assert len(world.cluster.all(DEPLOYMENT)) == 2  # workers serve until then
    world.cluster.clock.now += 600 + 40
    assert asyncio.run(loop.turn()).gone


def gateway_pod(world: World) -> str:
    return next(
        item["metadata"]["name"]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "gateway"
    )


def node(world: World, ready: str) -> None:
    """The node of all pods, as its controller sees it."""
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}}
    world.cluster.hardware({**head, "status": status})


@pytest.mark.parametrize(("ready", "waits"), [("Unknown", False), ("False", True), ("True", True)])
def test_a_deleted_service_waits_for_no_gateway_on_a_node_that_lost_power(ready: str, waits: bool):
    world = reference()
    node(world, ready)
    # nobody ends it: its kubelet does not report
    world.cluster.edit(
        POD, "ns", gateway_pod(world), lambda item: item["metadata"].update(finalizers=["x/y"])
    )
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    assert asyncio.run(world.new_loop().turn()).gone == (not waits)


def deleted(world: World, *finalizers: str) -> None:
    """Delete the service, which others keep too."""
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo",
        lambda item: item["metadata"].update(finalizers=[names.FINALIZER, *finalizers]),
    )  # fmt: skip
    world.cluster.remove(POD, "ns", gateway_pod(world))
    world.cluster.remove(VLM_SERVICE, "ns", "demo")


def test_a_deletion_that_others_hold_up_names_their_finalizers_and_is_stalled_at_last():
    world = reference()
    deleted(world, "backup/wait", "orphan")
    loop = world.new_loop()
    assert pause(asyncio.run(loop.turn())) == 1.0
    said = "finalizers of others keep the object: backup/wait; make their owners take them off"
    assert said in world.condition("Ready")["message"]
    assert world.condition("Stalled")["status"] == "False"
    world.cluster.clock.now += 600 + 59
    assert pause(asyncio.run(loop.turn())) == 1.0
    world.cluster.clock.now += 1
    assert asyncio.run(loop.turn()).gone, "they may wait for ours"
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "DrainTimeout")
    assert rps(world) == "F/F/T"
    assert said in stalled["message"]


def test_a_deletion_ends_at_once_when_the_last_finalizer_of_others_falls():
    world = reference()
    deleted(world, "backup/wait")
    loop = world.new_loop()
    assert pause(asyncio.run(loop.turn())) == 1.0
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo",
        lambda item: item["metadata"].update(finalizers=[names.FINALIZER]),
    )  # fmt: skip
    assert asyncio.run(loop.turn()).gone


@pytest.mark.parametrize("error", [ClusterError, UnavailableError])
def test_a_gateway_that_may_not_be_deleted_is_named_and_holds_the_service_up_for_a_time(error):
    world = reference()

    class Refusing(DyingCluster):
        async def delete(self, kind, namespace, name, *, uid):
            raise error(403, "Forbidden", "a webhook denied the request")

    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    loop = world.new_loop(Refusing(world.cluster, at=None))
    assert pause(asyncio.run(loop.turn())) == 1.0
    said = world.condition("Ready")["message"]
    assert said.startswith("Deployment demo-gateway cannot be deleted: a webhook denied")
    world.cluster.clock.now += 600 + 40
    assert asyncio.run(loop.turn()).gone


def test_a_status_that_cannot_be_written_does_not_keep_a_deleted_service():
    world = reference()

    class Refusing(DyingCluster):
        async def apply(self, manifest, *, manager, subresource="", dry_run=False):
            if subresource == "status" and manifest["kind"] == VLM_SERVICE.kind:
                raise ClusterError(403, "Forbidden", "a webhook denied the request")
            return await super().apply(
                manifest, manager=manager, subresource=subresource, dry_run=dry_run
            )

    for pod in world.cluster.all(POD):
        if pod["metadata"]["labels"][names.LABEL_ROLE] == "gateway":
            world.cluster.remove(POD, "ns", pod["metadata"]["name"])
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    loop = world.new_loop(Refusing(world.cluster, at=None))
    assert asyncio.run(loop.turn()).gone


def test_a_loop_writes_nothing_if_another_service_took_the_name():
    world = reference()
    release(world)
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    world.apply(spec())
    before = world.written()
    outcome = asyncio.run(world.loop.turn())
    assert outcome.gone
    assert pause(outcome) == 0.0, "another loop begins with the new one at once"
    assert world.written() == before


def test_a_turn_of_a_deleted_service_creates_nothing():
    world = reference()
    world.cluster.remove(DEPLOYMENT, "ns", "demo-gateway")
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    world.turn()
    assert {verb for verb, kind, *_ in world.cluster.writes if kind == "Deployment"} == {"apply"}
    assert "demo-gateway" not in [i["metadata"]["name"] for i in world.cluster.all(DEPLOYMENT)]


def test_our_finalizer_is_there_before_the_first_child_and_those_of_others_stay():
    world = World(spec())
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo", lambda item: item["metadata"].update(finalizers=["a/b"])
    )
    world.turn()
    assert world.cluster.writes[0] == ("merge", "VLMService", "demo", names.MANAGER)
    assert meta(world)["finalizers"] == ["a/b", names.FINALIZER]
    release(world)
    world.turn()
    assert meta(world)["finalizers"] == [names.FINALIZER], "it is put back"


def test_a_refused_manifest_has_our_finalizer_too():
    world = World(body(decode={"scaling": {"mode": "Manual"}}))
    world.turn()
    assert meta(world)["finalizers"] == [names.FINALIZER]


@pytest.mark.parametrize("begun", [False, True], ids=["before its drain", "in the middle"])
def test_a_service_with_the_finalizer_of_kopf_ends_after_an_upgrade(begun: bool):
    """Earlier releases let kopf add our finalizer: another field manager owns it."""
    world = World(spec())
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo",
        lambda item: item["metadata"].update(finalizers=[names.FINALIZER]), manager="kopf",
    )  # fmt: skip
    world.converge()
    assert ("merge", "VLMService") not in [write[:2] for write in world.cluster.writes]
    world.cluster.edit(
        POD, "ns", gateway_pod(world), lambda item: item["metadata"].update(finalizers=["x/y"])
    )
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    if begun:  # by the earlier release
        world.cluster.remove(DEPLOYMENT, "ns", "demo-gateway")
    loop = world.new_loop()
    assert pause(asyncio.run(loop.turn())) == 1.0
    world.cluster.edit(
        POD, "ns", gateway_pod(world), lambda item: item["metadata"].update(finalizers=[])
    )
    assert asyncio.run(loop.turn()).gone
    assert world.cluster.all(VLM_SERVICE) == []


def test_a_service_that_changed_since_it_was_read_keeps_its_finalizers():
    world = reference()
    world.cluster.remove(POD, "ns", gateway_pod(world))
    world.cluster.remove(VLM_SERVICE, "ns", "demo")

    class Late(DyingCluster):
        async def get(self, kind, namespace, name):
            found = await super().get(kind, namespace, name)
            world.cluster.edit(
                VLM_SERVICE, "ns", "demo",
                lambda item: item["metadata"].update(finalizers=[names.FINALIZER, "a/b"]),
            )  # fmt: skip
            return found

    with pytest.raises(ConflictError):
        asyncio.run(world.new_loop(Late(world.cluster, at=None)).turn())
    assert meta(world)["finalizers"] == [names.FINALIZER, "a/b"]


def meta(world: World) -> dict:
    found: dict = world.cluster.all(VLM_SERVICE)[0]["metadata"]
    return found


def release(world: World) -> None:
    """Do what `kubectl vlm release-finalizers` does."""
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo", lambda item: item["metadata"].update(finalizers=[])
    )


@pytest.mark.parametrize("status", [403, 409, 503])
def test_an_api_server_that_refuses_a_write_is_asked_again(status: int):
    world = World(spec())

    class Refusing(DyingCluster):
        refused = 0

        async def apply(self, manifest, **more):
            if manifest["kind"] == "Service" and self.refused < 2 and not more.get("dry_run"):
                self.refused += 1
                kind = {409: ConflictError, 503: UnavailableError}.get(status, ClusterError)
                raise kind(status, "Refused", "not now")
            return await super().apply(manifest, **more)

    refusing = Refusing(world.cluster, at=None)
    world.loop = world.new_loop(refusing)
    for _ in range(3):
        with contextlib.suppress(ClusterError):
            world.turn()
    assert refusing.refused == 2
    world.converge()
    assert world.snapshot() == reference().snapshot()
