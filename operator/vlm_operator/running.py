"""What runs side by side while this process leads, and what becomes of it when something ends.

acquire ─▶ lease, on a thread of its own ┐
           kopf: VLMServices             │
           informers: their children     ├─ whichever ends first ends the process
           node classes, a look around   ┘  (status 1 where leadership was lost, or it broke)
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
from vlm_operator.leader import Aside, Lease
from vlm_operator.reconcile import ClassLoop

logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.5  # for a turn to reach its end; a cut one does no harm
LOOK_SECONDS = 30.0  # between lists that are held against what kopf told
CLASS_SECONDS = 10.0  # between two looks at node classes and their nodes
LAG_SECONDS = 0.1  # between two looks at how late the event loop is


@dataclasses.dataclass(frozen=True)
class Parts:
    """Everything that runs, and what it shares.

    Attributes:
        namespaces: that are looked after; empty for all.
        cluster: fenced by the lease.
        aside: where the lease is renewed.
        stop: set when the process is told to end.
        identity: what kopf calls this process. Without one kopf asks for the user's name, and an
            image's uid has none.
    """

    namespaces: tuple[str, ...]
    app: App
    classes: ClassLoop
    informers: Sequence[Informer]
    cluster: Cluster
    lease: Lease
    aside: Aside
    stop: asyncio.Event
    identity: str


async def lead(parts: Parts) -> int:
    """Wait for the lease, then run until something ends; returns the exit status."""
    stopping = asyncio.create_task(parts.stop.wait())
    acquiring = asyncio.create_task(parts.aside.do(parts.lease.acquire()))
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
            _tend_classes(parts.classes),
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
        # watches and loops end first, so that nothing is written after the lease is given up
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
    if not parts.app.turning:  # else a write may be on its way, and the lease is left to run out
        await parts.aside.do(parts.lease.release())
    return 1 if broken else 0


def stop_on_signals(stop: asyncio.Event) -> None:
    """Stop on SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _keep(parts: Parts) -> None:
    """Renew the lease; where it could not be for a while, wake everybody once it could."""
    loop = asyncio.get_running_loop()

    def told(held: bool) -> None:
        metrics.LEADER.set(int(held))
        if held:
            loop.call_soon_threadsafe(parts.app.wake_all)

    await parts.aside.do(parts.lease.keep(told))


async def _look(app: App, cluster: Cluster, namespaces: tuple[str, ...]) -> None:
    """Hold what is there against what kopf told, for the health check."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        # without an API server nobody sees anything, and a restart would not help
        with contextlib.suppress(ClusterError):
            found = [
                await cluster.list(VLM_SERVICE, namespace) for namespace in namespaces or (None,)
            ]
            app.sight.compare(itertools.chain.from_iterable(found))


async def _tend_classes(classes: ClassLoop) -> None:
    """Keep the status of node classes, until the operator ends."""
    while True:
        try:
            await classes.turn()
        except (ClusterError, LeaseLostError) as error:
            logger.warning("node classes failed", extra={"error": str(error)})
        await asyncio.sleep(CLASS_SECONDS)


async def _measure_lag() -> None:
    """Note how much later than asked for this event loop comes round."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        metrics.LOOP_LAG.observe(max(0.0, clock() - due))


async def _operate(parts: Parts, kopf_stop: asyncio.Event) -> None:
    """Run kopf until one of its own tasks ends, and raise what ended it.

    kopf then ends the others, but where the API server is away at that moment it waits for them for
    ever, with all watches dead: it gets `EXIT_SECONDS`.
    """
    registry = kopf.OperatorRegistry()
    register(registry)
    memo = kopf.Memo()
    memo.app = parts.app
    ready = asyncio.Event()

    async def take_signals_back() -> None:
        # kopf sets handlers of its own when it starts
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
