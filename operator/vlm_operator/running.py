"""Runs the concurrent tasks of the leading process, and stops all of them when one ends.

acquire ─▶ lease renewal, on its own thread ┐
           kopf: events of VLMServices      │
           lists of VLMServices             ├─ the first task that ends stops the process
           informers: their children        │  (status 1 if the lease is lost or a task failed)
           turns, node classes, VLMPools    ┘
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
import signal
from collections.abc import Sequence
from typing import Any

import kopf

from vlm_operator import metrics
from vlm_operator.cluster import VLM_SERVICE, Cluster
from vlm_operator.errors import ClusterError, LeaseLostError
from vlm_operator.informer import Informer
from vlm_operator.kopf_events import Kopf, ServiceEvents, register
from vlm_operator.leader import BackgroundLoop, Lease
from vlm_operator.reconcile.class_and_pool_status import NodeClassReconciler, PoolLoop
from vlm_operator.reconcile.queue import Cause
from vlm_operator.reconcile.workers import Workers

logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.5  # time for running turns to end; an interrupted turn does no harm
LEADER_SPREAD_SECONDS = 2.0  # in which all services get a turn once writes are allowed again
LATE_SECONDS = 5.0  # an event that comes later than this after a list was missed
LOOP_SECONDS = 10.0  # pause between turns for node classes, and for VLMPools
LAG_SECONDS = 0.1  # interval of the measurements of event loop lag


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the process, as `__main__` builds them.

    Attributes:
        cluster: client that is fenced by the lease.
        background: thread that renews the lease.
        stop: set by a signal that ends the process.
        identity: kopf's name of this process. Without one, kopf asks for the name of the user,
            which the container's uid does not have.
    """

    namespaces: tuple[str, ...]  # empty for all
    workers: Workers
    kopf: Kopf
    resync_seconds: float
    classes: NodeClassReconciler
    pools: PoolLoop
    informers: Sequence[Informer]
    cluster: Cluster
    lease: Lease
    background: BackgroundLoop
    stop: asyncio.Event
    identity: str


async def lead(parts: Parts) -> int:
    """Wait for the lease, then run until the first task ends; return the exit status."""
    stopping = asyncio.create_task(parts.stop.wait())
    acquiring = asyncio.create_task(parts.background.do(parts.lease.acquire()))
    await asyncio.wait([stopping, acquiring], return_when=asyncio.FIRST_COMPLETED)
    if not acquiring.done():
        acquiring.cancel()
        return 0
    acquiring.result()
    metrics.LEADER.set(1)
    kopf_stop = asyncio.Event()
    keeping = asyncio.create_task(_keep(parts))
    operating = asyncio.create_task(_operate(parts, kopf_stop))
    working = asyncio.create_task(parts.workers.run())
    others = [
        asyncio.create_task(work)
        for work in (
            _resync(parts),
            _run_periodically(parts.classes, "node classes failed"),
            _run_periodically(parts.pools, "VLMPools failed"),
            _measure_lag(),
            *(informer.run() for informer in parts.informers),
        )
    ]
    tasks = [stopping, keeping, operating, working, *others]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    metrics.LEADER.set(0)
    kopf_stop.set()
    working.cancel()
    lost = keeping.done()
    if lost:
        logger.error("lease lost", extra={"error": str(keeping.exception())})
    finished = await parts.workers.finish(0.0 if lost else EXIT_SECONDS)
    if not lost:
        await asyncio.wait([operating], timeout=EXIT_SECONDS)
    broken = [
        error
        for task in (operating, working, *others)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None
    ]
    for error in broken:
        logger.error("ended by an error", exc_info=error)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=EXIT_SECONDS)
    if lost:
        return 1
    if finished:  # else a write may be in flight, and the lease must expire instead
        await parts.background.do(parts.lease.release())
    return 1 if broken else 0


def stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _keep(parts: Parts) -> None:
    """Renew the lease; after an interruption, all services get a turn once it is renewed."""
    loop = asyncio.get_running_loop()

    def restart() -> None:
        spread = functools.partial(random.uniform, 0.0, LEADER_SPREAD_SECONDS)
        parts.workers.notify_all(Cause.LEADER, spread=spread)

    def notify(held: bool) -> None:
        metrics.LEADER.set(int(held))
        if held:
            loop.call_soon_threadsafe(restart)

    await parts.background.do(parts.lease.renew_loop(notify))


async def _resync(parts: Parts) -> None:
    events: ServiceEvents = parts.kopf.events
    while True:
        await asyncio.sleep(parts.resync_seconds)
        before = events.signatures
        with contextlib.suppress(ClusterError):
            services = [
                item
                for namespace in parts.namespaces or (None,)
                for item in await parts.cluster.list(VLM_SERVICE, namespace)
            ]
            await asyncio.sleep(LATE_SECONDS)
            metrics.MISSED_EVENTS.inc(events.missed(before, services))


async def _run_periodically(loop: NodeClassReconciler | PoolLoop, failed: str) -> None:
    """Update the status of node classes, or of VLMPools, until the task is cancelled."""
    while True:
        try:
            await loop.turn()
        except (ClusterError, LeaseLostError) as error:
            logger.warning(failed, extra={"error": str(error)})
        await asyncio.sleep(LOOP_SECONDS)


async def _measure_lag() -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        metrics.LOOP_LAG.observe(max(0.0, clock() - due))


async def _operate(parts: Parts, kopf_stop: asyncio.Event) -> None:
    """Run kopf until one of its tasks ends, and raise the error of that task.

    kopf then stops its other tasks. If the API server is unavailable at that time, kopf waits for
    them without a limit and without live watches. So it gets `EXIT_SECONDS`.
    """
    registry = kopf.OperatorRegistry()
    register(registry)
    memo = kopf.Memo()
    memo.kopf = parts.kopf
    ready = asyncio.Event()

    async def take_signals_back() -> None:
        # kopf replaces the signal handlers when it starts
        await ready.wait()
        stop_on_signals(parts.stop)

    signals = asyncio.create_task(take_signals_back())
    existing = asyncio.all_tasks()
    identity: Any = parts.identity  # kopf's type for it is not exported
    tasks = await kopf.spawn_tasks(
        registry=registry,
        memo=memo,
        identity=identity,
        standalone=True,
        clusterwide=not parts.namespaces,
        namespaces=parts.namespaces,
        stop_flag=kopf_stop,
        ready_flag=ready,
    )
    ending = asyncio.create_task(kopf.run_tasks(tasks, ignored=existing))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        await asyncio.wait([ending], timeout=EXIT_SECONDS)
    finally:
        ending.cancel()
        signals.cancel()
    for task in ended:
        task.result()
