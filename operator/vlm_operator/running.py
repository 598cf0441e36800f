"""Runs the concurrent tasks of the leading process, and stops all of them when one ends.

acquire ─▶ lease renewal, on its own thread ┐
           kopf: VLMServices                │
           informers: their children        ├─ the first task that ends stops the process
           node classes, VLMPools           │  (status 1 if the lease is lost or a task failed)
           health check of kopf's watches   ┘
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import signal
from collections.abc import Sequence
from typing import Any

import kopf

from vlm_operator import metrics
from vlm_operator.cluster import VLM_SERVICE, Cluster
from vlm_operator.errors import ClusterError, LeaseLostError
from vlm_operator.handlers import App, register
from vlm_operator.informer import Informer
from vlm_operator.leader import BackgroundLoop, Lease
from vlm_operator.reconcile import NodeClassReconciler, PoolLoop

logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.5  # time for running turns to end; an interrupted turn does no harm
LOOK_SECONDS = 30.0  # interval of the lists that are compared with kopf's events
LOOP_SECONDS = 10.0  # pause between turns for node classes, and for VLMPools
LAG_SECONDS = 0.1  # interval of the measurements of event loop lag


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the process, as `__main__` builds them.

    Attributes:
        namespaces: namespaces with the VLMServices of this operator; empty for all.
        cluster: client that is fenced by the lease.
        background: thread that renews the lease.
        stop: set by a signal that ends the process.
        identity: kopf's name of this process. Without one, kopf asks for the name of the user,
            which the container's uid does not have.
    """

    namespaces: tuple[str, ...]
    app: App
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
    others = [
        asyncio.create_task(work)
        for work in (
            _look(parts.app, parts.cluster, parts.namespaces),
            _tend(parts.classes, "node classes failed"),
            _tend(parts.pools, "VLMPools failed"),
            _measure_lag(),
            *(informer.run() for informer in parts.informers),
        )
    ]
    tasks = [stopping, keeping, operating, *others]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    metrics.LEADER.set(0)
    kopf_stop.set()
    lost = keeping.done()
    if lost:
        logger.error("lease lost", extra={"error": str(keeping.exception())})
    else:
        # watches and loops end first, so that no write follows the release of the lease
        await asyncio.wait([operating], timeout=EXIT_SECONDS)
    broken = [
        error
        for task in (operating, *others)
        if task.done() and (error := task.exception()) is not None
    ]
    for error in broken:
        logger.error("ended by an error", exc_info=error)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=EXIT_SECONDS)
    if lost:
        return 1
    if not parts.app.turning:  # else a write may be in flight, and the lease must expire instead
        await parts.background.do(parts.lease.release())
    return 1 if broken else 0


def stop_on_signals(stop: asyncio.Event) -> None:
    """Stop on SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _keep(parts: Parts) -> None:
    """Renew the lease; after an interruption, wake all loops once it is renewed."""
    loop = asyncio.get_running_loop()

    def notify(held: bool) -> None:
        metrics.LEADER.set(int(held))
        if held:
            loop.call_soon_threadsafe(parts.app.wake_all)

    await parts.background.do(parts.lease.renew_loop(notify))


async def _look(app: App, cluster: Cluster, namespaces: tuple[str, ...]) -> None:
    """Compare lists of VLMServices with the events from kopf, for the health check."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        # if the API server is unavailable, a restart would not help
        with contextlib.suppress(ClusterError):
            found = [
                await cluster.list(VLM_SERVICE, namespace) for namespace in namespaces or (None,)
            ]
            app.sight.compare(itertools.chain.from_iterable(found))


async def _tend(loop: NodeClassReconciler | PoolLoop, failed: str) -> None:
    """Update the status of node classes, or of VLMPools, until the task is cancelled."""
    while True:
        try:
            await loop.turn()
        except (ClusterError, LeaseLostError) as error:
            logger.warning(failed, extra={"error": str(error)})
        await asyncio.sleep(LOOP_SECONDS)


async def _measure_lag() -> None:
    """Record the lag of the event loop."""
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
    memo.app = parts.app
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
