"""What is left of a service that goes, and of a turn that the API server refuses."""

import asyncio
import contextlib

import pytest
from operator_support import World, body, pool

from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, POD, VLM_SERVICE
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError
from vlm_operator.testing import DyingCluster


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
