"""List, watch, list again: turns read what is there, or are told that nobody can see it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.fakes import FakeCluster, FakeScraper, WatchableCluster, run_controllers
from support.world import body, pool
from vlm_operator import informer as informers
from vlm_operator import names
from vlm_operator.backoff import Backoff
from vlm_operator.cluster import (
    CHILD_KINDS,
    CONFIG_MAP,
    NODE,
    POD,
    SERVICE,
    VLM_NODE_CLASS,
    VLM_POOL,
    VLM_SERVICE,
    Cluster,
)
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.informer import CachedClient, Informer
from vlm_operator.reconcile.class_and_pool_status import (
    NodeClassReconciler,
    NodeClassUsage,
    PoolLoop,
)
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.service import ServiceReconciler

FOLLOWED = (*CHILD_KINDS, POD, VLM_NODE_CLASS, NODE)
LABELS = {names.LABEL_SERVICE: "demo"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informers, "MIN_LIST_SECONDS", 0.0)
    monkeypatch.setattr(informers, "RETRY", Backoff(longest=0.001))
    monkeypatch.setattr(informers, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(informers, "LIST_WAIT_SECONDS", 0.2)


class Followed:
    """A cluster, and what a process sees of it."""

    def __init__(self, relist: float) -> None:
        self.cluster = WatchableCluster()
        self.woken: list[tuple[str, str]] = []
        self.informers = {
            (kind, None): Informer(
                self.cluster,
                kind,
                None,
                notify=self.woken.append,
                relist=relist,
            )
            for kind in FOLLOWED
        }
        self.reads = CachedClient(self.cluster, self.informers)


@contextlib.asynccontextmanager
async def followed(*, relist: float = 3600.0) -> AsyncIterator[Followed]:
    """Informers at work."""
    found = Followed(relist)
    tasks = [asyncio.create_task(one.run()) for one in found.informers.values()]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def config_map(name: str, data: str = "", **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "ns", "labels": {**LABELS, **labels}},
        "data": {"a": data},
    }


async def data(cluster: Cluster) -> dict[str, str]:
    found = await cluster.list(CONFIG_MAP, "ns", LABELS)
    return {one["metadata"]["name"]: one["data"]["a"] for one in found}


async def test_a_list_comes_from_memory_and_a_change_wakes_its_service():
    async with followed() as found:
        found.cluster.hardware(config_map("one", "1"))
        assert await data(found.reads) == {"one": "1"}
        assert found.woken == [("ns", "demo")]
        lists = dict(found.cluster.lists)
        found.cluster.edit(CONFIG_MAP, "ns", "one", lambda item: item.update(data={"a": "2"}))
        await until(lambda: len(found.woken) == 2)
        assert await data(found.reads) == {"one": "2"}
        found.cluster.remove(CONFIG_MAP, "ns", "one")
        await until(lambda: len(found.woken) == 3)
        assert await data(found.reads) == {}
        assert found.cluster.lists == lists


async def test_a_write_is_in_the_next_list_and_its_echo_wakes_no_turn():
    async with followed() as found:
        assert await data(found.reads) == {}
        for number in range(5):
            await found.reads.apply(config_map("one", str(number)), manager="m")
            assert await data(found.reads) == {"one": str(number)}
        uid = (await found.reads.list(CONFIG_MAP, "ns", LABELS))[0]["metadata"]["uid"]
        await found.reads.delete(CONFIG_MAP, "ns", "one", uid=uid)
        assert await data(found.reads) == {}
        found.cluster.hardware(config_map("other"))
        await until(lambda: ("ns", "demo") in found.woken)
        # the end of `one` and the beginning of `other`, and none of five echoes
        assert len(found.woken) == 2


async def test_node_classes_read_nodes_from_memory():
    async with followed() as found:
        manifest = {
            "apiVersion": VLM_NODE_CLASS.api_version,
            "kind": VLM_NODE_CLASS.kind,
            "metadata": {"name": "gpu"},
            "spec": {"nodeSelector": {"type": "gpu"}},
        }
        found.cluster.hardware(manifest)
        node = {"apiVersion": "v1", "kind": "Node"}
        found.cluster.hardware({**node, "metadata": {"name": "one", "labels": {"type": "gpu"}}})
        classes = NodeClassReconciler(
            found.reads, NodeClassUsage(), clock=found.cluster.clock, changed=lambda: None
        )
        for _ in range(3):
            await classes.turn()
        found.cluster.hardware({**node, "metadata": {"name": "two", "labels": {"type": "gpu"}}})
        async with asyncio.timeout(60):
            while len(await found.reads.list(NODE)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await classes.turn()
        (item,) = await found.reads.list(VLM_NODE_CLASS)
        assert item["status"]["nodes"] == 2
        assert found.cluster.lists["Node"] == 1


async def test_pools_made_by_hand_are_read_from_memory_and_asked_for_once():
    async with followed() as found:
        head = {"apiVersion": VLM_POOL.api_version, "kind": VLM_POOL.kind}
        meta = {"name": "mine", "namespace": "ns"}
        found.cluster.hardware({**head, "metadata": meta, "spec": {"replicas": 3}})
        pools = PoolLoop(found.reads, namespaces=(), clock=found.cluster.clock)
        for _ in range(3):
            await pools.turn()
        (item,) = found.cluster.all(VLM_POOL)
        assert item["status"]["conditions"][0]["reason"] == "NoService"
        assert found.cluster.lists["VLMPool"] == 1
        assert len([write for write in found.cluster.writes if write[0] == "apply"]) == 1
        assert not found.woken


async def test_a_dry_run_leaves_no_trace():
    async with followed() as found:
        await found.reads.apply(config_map("one"), manager="m", dry_run=True)
        assert await data(found.reads) == {}


async def test_what_is_not_followed_is_asked_of_the_api_server():
    async with followed() as found:
        assert await found.reads.list(VLM_SERVICE) == []
        found.cluster.hardware(body())
        assert len(await found.reads.list(VLM_SERVICE)) == 1


@pytest.mark.parametrize("status", [410, 500])
async def test_a_watch_that_breaks_is_made_up_for(status: int):
    async with followed() as found:
        found.cluster.hardware(config_map("one", "1"))
        assert await data(found.reads) == {"one": "1"}
        found.cluster.down = ClusterError(status, "Gone", "too old")
        await until(lambda: found.cluster.watching == 0)
        found.cluster.edit(CONFIG_MAP, "ns", "one", lambda item: item.update(data={"a": "2"}))
        with pytest.raises(UnavailableError, match="configmaps are not listed: Gone"):
            await data(found.reads)
        found.cluster.down = None
        assert await data(found.reads) == {"one": "2"}


async def test_what_is_known_may_be_read_for_a_while_after_the_watch_broke(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(informers, "GRACE_SECONDS", 60.0)
    async with followed() as found:
        found.cluster.hardware(config_map("one", "1"))
        assert await data(found.reads) == {"one": "1"}
        found.cluster.down = ClusterError(500, "InternalError", "later")
        await until(lambda: found.cluster.watching == 0)
        assert await data(found.reads) == {"one": "1"}


async def test_a_watch_that_ended_is_resumed_and_nothing_is_listed_again():
    async with followed() as found:
        found.cluster.hardware(config_map("one", "1"))
        assert await data(found.reads) == {"one": "1"}
        await until(lambda: found.cluster.watching == len(FOLLOWED))
        lists = dict(found.cluster.lists)
        found.cluster.end_watches()
        found.cluster.hardware(config_map("two", "2"))
        found.cluster.remove(CONFIG_MAP, "ns", "one")
        await until(lambda: found.cluster.watching == len(FOLLOWED))
        async with asyncio.timeout(60):
            while await data(found.reads) != {"two": "2"}:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert found.cluster.lists == lists


async def test_an_event_that_got_lost_is_made_up_for_by_the_next_list():
    async with followed(relist=0.0) as found:
        found.cluster.hardware(config_map("one", "1"))
        assert await data(found.reads) == {"one": "1"}
        await until(lambda: found.cluster.watching == len(FOLLOWED))
        found.cluster.hardware(config_map("two", "2"))
        found.cluster.lose()
        found.cluster.end_watches()
        await until(lambda: found.cluster.lists["ConfigMap"] > 1)
        async with asyncio.timeout(60):
            while await data(found.reads) != {"one": "1", "two": "2"}:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def _live(cluster: FakeCluster, reads: Cluster, *, seed: int | None) -> list[Any]:
    """Create, scale, roll and put back; returns what was written.

    With a seed, turns come before memory has heard of everything.
    """
    draw = random.Random(seed)
    loop = ServiceReconciler(
        "ns", "demo", cluster=reads, scraper=FakeScraper(), options=Options(), clock=cluster.clock
    )
    cluster.hardware(body(encoder=pool(1), decode=pool(2)))

    async def turns(count: int) -> None:
        for _ in range(count):
            cluster.clock.now += 3.0
            await loop.turn()
            run_controllers(cluster, start=True)
            if seed is None or draw.random() < 0.5:
                await asyncio.sleep(0.01)

    await turns(6)
    cluster.edit(VLM_SERVICE, "ns", "demo", lambda item: item.update(spec=_spec(decode=pool(4))))
    await turns(4)
    cluster.edit(
        VLM_SERVICE, "ns", "demo",
        lambda item: item.update(spec=_spec(decode={**pool(1), "engine": {"extraArgs":["--x=1"]}})),
    )  # fmt: skip
    await turns(12)
    service = f"{names.child('demo', names.Role.GATEWAY)}"
    cluster.remove(SERVICE, "ns", service)
    await turns(8)
    await asyncio.sleep(0.01)
    await turns(4)
    return [write[:3] for write in cluster.writes]


def _spec(**pools: Any) -> dict[str, Any]:
    found: dict[str, Any] = body(encoder=pool(1), **pools)["spec"]
    return found


def _children(cluster: FakeCluster) -> dict[Any, Any]:
    return {
        (kind.kind, item["metadata"]["name"]): item.get("spec", item.get("data"))
        for kind in CHILD_KINDS
        for item in cluster.all(kind)
    }


async def test_a_service_ends_the_same_whether_turns_read_from_memory_or_not():
    direct = FakeCluster()
    await _live(direct, direct, seed=None)
    async with followed() as found:
        wrote = await _live(found.cluster, found.reads, seed=None)
        assert _children(found.cluster) == _children(direct)
        assert wrote == [write[:3] for write in direct.writes]


@pytest.mark.parametrize("seed", range(2))
async def test_turns_that_come_before_the_news_end_in_the_same_place(seed: int):
    direct = FakeCluster()
    await _live(direct, direct, seed=None)
    async with followed() as found:
        await _live(found.cluster, found.reads, seed=seed)
        assert _children(found.cluster) == _children(direct)
