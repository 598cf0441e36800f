"""VLMPools that people made by hand: each is told once that nobody reads it, and no other is."""

import asyncio
from typing import Any

from support.fakes import DyingCluster, FakeCluster
from support.world import World, body, external, kstatus
from vlm_operator import names
from vlm_operator.cluster import VLM_POOL
from vlm_operator.errors import ClusterError
from vlm_operator.reconcile.class_and_pool_status import PoolLoop
from vlm_operator.status.causes import split


def by_hand(name: str = "mine", namespace: str = "ns", **meta: Any) -> dict[str, Any]:
    head = {"apiVersion": VLM_POOL.api_version, "kind": VLM_POOL.kind}
    return {
        **head,
        "metadata": {"name": name, "namespace": namespace, **meta},
        "spec": {"replicas": 1000},
    }


def told(cluster: FakeCluster, *, times: int = 1, namespaces: tuple[str, ...] = ()) -> set[str]:
    """The VLMPools that are Stalled after some turns."""
    loop = PoolLoop(cluster, namespaces=namespaces, clock=cluster.clock)
    for _ in range(times):
        asyncio.run(loop.turn())
        cluster.clock.now += 10
    return {
        item["metadata"]["name"]
        for item in cluster.all(VLM_POOL)
        if item.get("status", {}).get("conditions")
    }


def test_a_pool_made_by_hand_is_failed_and_says_cause_and_fix():
    cluster = FakeCluster()
    cluster.hardware(by_hand())
    assert told(cluster) == {"mine"}
    (item,) = cluster.all(VLM_POOL)
    assert kstatus(item) == "Failed"
    (condition,) = item["status"]["conditions"]
    assert condition["reason"] == "NoService"
    cause, fix = split(condition["message"])
    assert "no VLMService controls this VLMPool" in cause
    assert "create a VLMService" in fix


def test_a_pool_is_told_once_and_again_when_its_spec_changed():
    cluster = FakeCluster()
    cluster.hardware(by_hand())
    told(cluster, times=5)
    first = cluster.all(VLM_POOL)[0]["status"]["conditions"][0]
    assert len([write for write in cluster.writes if write[0] == "apply"]) == 1
    cluster.edit(VLM_POOL, "ns", "mine", lambda item: item["spec"].update(replicas=3))
    told(cluster, times=5)
    second = cluster.all(VLM_POOL)[0]["status"]["conditions"][0]
    assert second == {**first, "observedGeneration": first["observedGeneration"] + 1}
    assert len([write for write in cluster.writes if write[0] == "apply"]) == 2


def test_the_pools_of_a_service_are_left_alone_whatever_labels_others_have():
    world = World(body(decode=external(1, 4)))
    world.converge()
    labels = {names.LABEL_SERVICE: "demo", names.LABEL_ROLE: "decode"}
    world.cluster.hardware(by_hand("labelled", labels=labels))
    other = {"apiVersion": "v1", "kind": "VLMService", "name": "x", "uid": "u", "controller": True}
    world.cluster.hardware(by_hand("of-another-api", ownerReferences=[other]))
    assert told(world.cluster) == {"labelled", "of-another-api"}
    before = world.written()
    world.turn(seconds=5)
    told(world.cluster)
    assert world.written() == before


def test_an_operator_of_some_namespaces_tells_no_pool_elsewhere():
    cluster = FakeCluster()
    cluster.hardware(by_hand("here", "red"))
    cluster.hardware(by_hand("there", "blue"))
    assert told(cluster, namespaces=("red",)) == {"here"}


class Refusing(DyingCluster):
    """A webhook refuses one VLMPool."""

    async def apply(self, manifest: dict[str, Any], **more: Any) -> dict[str, Any]:
        if manifest["metadata"]["name"] == "first":
            raise ClusterError(403, "Forbidden", "no")
        return await super().apply(manifest, **more)


def test_a_pool_that_cannot_be_told_keeps_no_other_back():
    cluster = FakeCluster()
    for name in ("first", "second"):
        cluster.hardware(by_hand(name))
    loop = PoolLoop(Refusing(cluster, at=None), namespaces=(), clock=cluster.clock)
    asyncio.run(loop.turn())
    assert told(cluster, times=0) == {"second"}
