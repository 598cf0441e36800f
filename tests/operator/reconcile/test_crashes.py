"""A process killed before or after any write leaves a cluster that the next one finishes."""

import asyncio
import contextlib

import pytest
from operator_support import World, body, pool

from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, POD, VLM_SERVICE
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError
from vlm_operator.testing import Died, DyingCluster, settle


def spec() -> dict:
    return body(encoder=pool(), decode=pool(2))


def reference() -> World:
    world = World(spec())
    world.converge()
    return world


def writes_of_creation() -> int:
    world = World(spec())
    counting = DyingCluster(world.cluster, at=None)
    world.loop = world.new_loop(counting)
    world.converge()
    return counting.writes


def live_through(world: World, *, at: int, committed: bool) -> bool:
    """Run until the process dies at write `at`; tells whether it did."""
    world.loop = world.new_loop(DyingCluster(world.cluster, at=at, committed=committed))
    with contextlib.suppress(Died):
        world.converge()
        return False
    return True


def test_creation_converges_from_a_death_at_every_write():
    wanted = reference().snapshot()
    count = writes_of_creation()
    assert count > 20
    for at in range(count):
        for committed in (False, True):
            world = World(spec())
            assert live_through(world, at=at, committed=committed), f"write {at} never came"
            settle(world.cluster)
            world.loop = world.new_loop()
            world.converge()
            assert world.snapshot() == wanted, f"died at write {at}, committed {committed}"
            assert world.condition("Ready")["status"] == "True"


def test_a_rollout_converges_from_a_death_at_every_write():
    changed = body({"model": {"uri": "pvc://shapes", "dtype": "Float32"}}, decode=pool(2))
    world = World(body(decode=pool(2)))
    world.converge()
    world.apply(changed)
    world.converge(turns=20)
    wanted = world.snapshot()
    at = 0
    while True:
        world = World(body(decode=pool(2)))
        world.converge()
        world.apply(changed)
        if not live_through(world, at=at, committed=at % 2 == 0):
            break
        settle(world.cluster)
        world.loop = world.new_loop()
        world.converge(turns=20)
        assert world.snapshot() == wanted, f"died at write {at}"
        at += 1
    assert at > 8


def drain(world: World, cluster=None) -> None:
    """What the daemon does once the service is deleted, and kopf after it."""
    loop = world.new_loop(cluster)
    for _ in range(10):
        world.cluster.clock.now += 1
        pause = asyncio.run(loop.drain())
        settle(world.cluster)
        if pause is None:
            break
    else:
        raise AssertionError("the service never let go")
    world.cluster.edit(
        VLM_SERVICE, "ns", "demo", lambda item: item["metadata"].update(finalizers=[])
    )


def test_deletion_converges_from_a_death_at_every_write():
    at = 0
    while True:
        world = reference()
        world.cluster.remove(VLM_SERVICE, "ns", "demo")
        died = False
        try:
            drain(world, DyingCluster(world.cluster, at=at, committed=at % 2 == 1))
        except Died:
            died = True
            settle(world.cluster)
            drain(world)
        settle(world.cluster)
        assert world.cluster.all(POD) == []
        assert [key for key in world.snapshot() if key[0] != "Lease"] == []
        if not died:
            break
        at += 1
    assert at >= 2


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
        "draining 1 gateway pods with 3 requests in flight"
    )
    assert "demo-gateway" not in [i["metadata"]["name"] for i in world.cluster.all(DEPLOYMENT)]
    assert len(world.cluster.all(DEPLOYMENT)) == 2  # workers serve until then
    world.cluster.clock.now += 600 + 40
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
