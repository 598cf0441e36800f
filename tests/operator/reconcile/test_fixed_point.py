"""A service at rest: events, informers, queue and turns together, over an API server in memory.

The operator hears of its own writes, and still takes no turn for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from support.fakes import FakeScraper, WatchableCluster, run_controllers
from support.world import body, pool
from vlm_operator import names
from vlm_operator.cluster import (
    CHILD_KINDS,
    NODE,
    POD,
    VLM_NODE_CLASS,
    VLM_SERVICE,
    WatchEventType,
)
from vlm_operator.informer import CachedClient, Informer
from vlm_operator.kopf_events import ServiceEvents
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.queue import Cause, Key, Outcome
from vlm_operator.reconcile.service import ServiceReconciler
from vlm_operator.reconcile.workers import Workers

PATIENCE_SECONDS = 60.0


class Counted(ServiceReconciler):
    """Notes for each turn whether something was known to have changed."""

    turns: list[bool]

    async def turn(self, *, woken: bool = True, rank: float = 0.0) -> Outcome:
        outcome = await super().turn(woken=woken, rank=rank)
        self.turns.append(woken)
        return outcome


class Operator:
    """What `__main__` puts together, without the lease and without HTTP."""

    def __init__(self) -> None:
        self.cluster = WatchableCluster()
        self.turns: list[bool] = []
        self.informers = {
            (kind, None): Informer(self.cluster, kind, None, notify=self._notify)
            for kind in (*CHILD_KINDS, POD, VLM_NODE_CLASS, NODE)
        }
        self.workers = Workers(self._make, clock=asyncio.get_running_loop().time)
        self.events = ServiceEvents(self.workers)

    def _notify(self, service: Key) -> None:
        self.workers.notify(service, Cause.CHILD)

    def _make(self, namespace: str, name: str) -> ServiceReconciler:
        found = Counted(
            namespace,
            name,
            cluster=CachedClient(self.cluster, self.informers),
            scraper=FakeScraper(),
            options=Options(),
            clock=self.cluster.clock,
        )
        found.turns = self.turns
        return found

    async def follow(self) -> None:
        """Be kopf: pass on each event of a VLMService."""
        async for event in self.cluster.watch(
            VLM_SERVICE, None, labelled="", since=0, seconds=1e6, silence=1e6
        ):
            meta = event.item["metadata"]
            if event.type is WatchEventType.DELETED:
                self.events.deleted((meta["namespace"], meta["name"]))
            else:
                self.events.changed(meta)


@contextlib.asynccontextmanager
async def operator() -> AsyncIterator[Operator]:
    found = Operator()
    work = (found.workers.run(), found.follow(), *(one.run() for one in found.informers.values()))
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await found.workers.finish(0.0)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def timers(found: Operator, count: int) -> list[bool]:
    """Wait for so many turns that timers start; returns all turns until then."""
    begin = len(found.turns)
    await until(lambda: found.turns[begin:].count(False) >= count)
    return found.turns[begin:]


async def at_rest(found: Operator) -> None:
    """Let controllers and the operator work until neither changes anything."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            before = found.cluster.version
            found.cluster.clock.now += 3.0
            run_controllers(found.cluster)
            if True not in await timers(found, 1) and found.cluster.version == before:
                return


def manifest() -> dict[str, Any]:
    return body({"autoscaling": {"intervalSeconds": 1}}, decode=pool(2))


async def test_at_rest_only_timers_start_turns_and_nothing_is_written():
    async with operator() as found:
        found.cluster.hardware(manifest())
        await at_rest(found)
        written = len(found.cluster.writes)
        assert await timers(found, 2) == [False, False]
        assert found.cluster.writes[written:] == []


async def test_a_status_write_of_ours_starts_no_turn():
    async with operator() as found:
        found.cluster.hardware(manifest())
        await at_rest(found)
        status = {**found.cluster.all(VLM_SERVICE)[0]["status"], "model": {"name": "other"}}
        found.cluster.edit(
            VLM_SERVICE, "ns", "demo", lambda item: item.update(status=status),
            manager=names.MANAGER_STATUS,
        )  # fmt: skip
        assert await timers(found, 2) == [False, False]


async def test_a_deleted_service_ends_with_its_drain_and_leaves_no_turns():
    async with operator() as found:
        found.cluster.hardware(manifest())
        await at_rest(found)
        found.cluster.remove(VLM_SERVICE, "ns", "demo")

        def gone() -> bool:
            run_controllers(found.cluster)
            return found.cluster.all(VLM_SERVICE) == [] and found.events.signatures == {}

        await until(gone)
        assert found.cluster.all(POD) == []
