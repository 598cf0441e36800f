"""What is left of a service that goes, and of a turn that the API server refuses."""

import asyncio
import contextlib

import pytest

from support.fakes import DyingCluster
from support.world import World, body, pool, rps
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
    assert asyncio.run(loop.drain()) == 1.0
    assert world.condition("Ready")["message"] == (
        "1 gateway pods finish the requests that they have"
    )
    assert "demo-gateway" not in [i["metadata"]["name"] for i in world.cluster.all(DEPLOYMENT)]
    assert len(world.cluster.all(DEPLOYMENT)) == 2  # workers serve until then
    world.cluster.clock.now += 600 + 40
    assert asyncio.run(loop.drain()) is None


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
    assert asyncio.run(world.new_loop().drain()) == (1.0 if waits else None)


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
    assert asyncio.run(loop.drain()) == 1.0
    said = "finalizers of others keep the object: backup/wait; make their owners take them off"
    assert said in world.condition("Ready")["message"]
    assert world.condition("Stalled")["status"] == "False"
    world.cluster.clock.now += 600 + 59
    assert asyncio.run(loop.drain()) == 1.0
    world.cluster.clock.now += 1
    assert asyncio.run(loop.drain()) is None, "they may wait for ours"
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "DrainTimeout")
    assert rps(world) == "F/F/T"
    assert said in stalled["message"]


def test_a_deletion_ends_at_once_when_the_last_finalizer_of_others_falls():
    world = reference()
    deleted(world, "backup/wait")
    loop = world.new_loop()
    assert asyncio.run(loop.drain()) == 1.0
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo",
        lambda item: item["metadata"].update(finalizers=[names.FINALIZER]),
    )  # fmt: skip
    assert asyncio.run(loop.drain()) is None


@pytest.mark.parametrize("error", [ClusterError, UnavailableError])
def test_a_gateway_that_may_not_be_deleted_is_named_and_holds_the_service_up_for_a_time(error):
    world = reference()

    class Refusing(DyingCluster):
        async def delete(self, kind, namespace, name, *, uid):
            raise error(403, "Forbidden", "a webhook denied the request")

    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    loop = world.new_loop(Refusing(world.cluster, at=None))
    assert asyncio.run(loop.drain()) == 1.0
    said = world.condition("Ready")["message"]
    assert said.startswith("Deployment demo-gateway cannot be deleted: a webhook denied")
    world.cluster.clock.now += 600 + 40
    assert asyncio.run(loop.drain()) is None


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
    assert asyncio.run(loop.drain()) is None


def test_a_drain_never_touches_another_service_that_took_the_name():
    world = reference()
    before = world.written()
    assert asyncio.run(world.new_loop().drain()) is None
    assert world.written() == before


def test_a_turn_of_a_deleted_service_writes_nothing():
    world = reference()
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    before = world.written()
    world.turn()
    assert world.written() == before


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
