"""The composition root: settings, the Lease, then kopf. The only file that knows every part.

vlm-operator ─▶ wait for the Lease ─▶ kopf.operator ┐
                                      renew it      ├─ whichever ends first ends the process
                                      /metrics      ┘  (status 1 where leadership was lost)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import kopf
from aiohttp import web

from vlm_operator import kube, metrics
from vlm_operator.cluster import VLM_SERVICE, Cluster
from vlm_operator.errors import ClusterError, LeaseLostError, OperatorError
from vlm_operator.framework import Watching
from vlm_operator.handlers import App, register
from vlm_operator.leader import Fenced, Lease, Timing
from vlm_operator.plan import Options as PlanOptions
from vlm_operator.pods import Images
from vlm_operator.reconcile import ClassBook, ClassLoop, Loop, Options
from vlm_operator.scrape import HttpScraper
from vlm_operator.settings import Settings
from vlm_operator.sight import Sight

logger = logging.getLogger("vlm_operator")

EXIT_SECONDS = 1.5  # for a turn to reach its end; a cut one does no harm
LOOK_SECONDS = 30.0  # between lists that are held against what kopf told
CLASS_SECONDS = 10.0  # between two looks at node classes and their nodes


def main() -> None:
    """Run until told to stop, or until another process leads."""
    settings = Settings.read(sys.argv[1:])
    _log(settings)
    status = asyncio.new_event_loop().run_until_complete(serve(settings))
    logging.shutdown()
    # whatever does not end when told to, in kopf or below it, ends here: a process that stays
    # without leading or without seeing helps nobody
    os._exit(status)


async def serve(settings: Settings) -> int:
    """Run the operator; returns the exit status."""
    try:
        loaded = await kube.configuration(settings.kubeconfig)
    except OperatorError as error:
        logger.error("no credentials", extra={"error": str(error)})
        return 2
    connections = [kube.KubeCluster(loaded) for _ in range(2)]
    lease = Lease(
        connections[0],  # its own: a renewal waits for nobody
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        identity=settings.identity,
        clock=time.monotonic,
        timing=_timing(settings),
    )
    scraper, book = HttpScraper(), ClassBook()
    cluster = Fenced(connections[1], lease)
    app = App(
        make_loop=lambda namespace, name: Loop(
            namespace,
            name,
            cluster=cluster,
            scraper=scraper,
            options=_options(settings),
            clock=time.time,
            # not all at the same moment, and none later than promised
            resync=settings.resync_seconds * random.uniform(0.7, 1.0),  # noqa: S311
            epoch=lambda: lease.epoch,
            book=book,
        ),
        connect=lambda: kube.connection(loaded),
        clock=time.monotonic,
        sight=Sight(time.monotonic),
        watching=Watching(whole=settings.watch_seconds, silence=settings.silence_seconds),
    )
    classes = ClassLoop(cluster, book, clock=time.time, changed=app.wake_all)
    stop = asyncio.Event()
    _on_signal(stop)
    try:
        async with _admin(settings, app, lease):
            return await _lead(settings, app, classes, cluster, lease, stop)
    except OSError as error:
        logger.error("cannot listen", extra={"error": str(error)})
        return 1
    finally:
        await scraper.close()
        for connection in connections:
            await connection.close()


async def _lead(
    settings: Settings,
    app: App,
    classes: ClassLoop,
    cluster: Cluster,
    lease: Lease,
    stop: asyncio.Event,
) -> int:
    """Wait for the lease, then run kopf until something ends it."""
    stopping = asyncio.create_task(stop.wait())
    acquiring = asyncio.create_task(lease.acquire())
    await asyncio.wait([stopping, acquiring], return_when=asyncio.FIRST_COMPLETED)
    if not acquiring.done():
        acquiring.cancel()
        return 0
    acquiring.result()
    metrics.LEADER.set(1)
    kopf_stop = asyncio.Event()
    tasks = {
        "stop": stopping,
        "lease": asyncio.create_task(lease.keep()),
        "lost": asyncio.create_task(app.lost.wait()),
        "kopf": asyncio.create_task(_operate(settings, app, kopf_stop, stop)),
        "look": asyncio.create_task(_look(settings, app, cluster)),
        "classes": asyncio.create_task(_tend_classes(app, classes)),
    }
    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
    metrics.LEADER.set(0)
    kopf_stop.set()
    lost = tasks["lost"].done() or tasks["lease"].done()
    if tasks["lease"].done():
        logger.error("lease lost", extra={"error": str(tasks["lease"].exception())})
    if not lost:
        # watches and loops end first, so that nothing is written after the lease is given up
        await asyncio.wait([tasks["kopf"]], timeout=EXIT_SECONDS)
    broken = [
        error
        for task in (tasks["kopf"], tasks["look"], tasks["classes"])
        if task.done() and (error := task.exception()) is not None
    ]
    for error in broken:
        logger.error("ended by an error", exc_info=error)
    for task in tasks.values():
        task.cancel()
    await asyncio.wait(tasks.values(), timeout=EXIT_SECONDS)
    if lost:
        return 1
    if not app.turning:  # else a write may be on its way, and the lease is left to run out
        await lease.release()
    return 1 if broken else 0


async def _look(settings: Settings, app: App, cluster: Cluster) -> None:
    """Hold what is there against what kopf told, for the health check."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        # without an API server nobody sees anything, and a restart would not help
        with contextlib.suppress(ClusterError):
            found = [
                await cluster.list(VLM_SERVICE, namespace)
                for namespace in settings.namespaces or (None,)
            ]
            app.sight.compare(itertools.chain.from_iterable(found))


async def _tend_classes(app: App, classes: ClassLoop) -> None:
    """Keep the status of node classes, until the operator ends."""
    while True:
        try:
            await classes.turn()
        except LeaseLostError as error:
            logger.error("lease lost", extra={"error": str(error)})
            app.lost.set()
        except ClusterError as error:
            logger.warning("node classes failed", extra={"error": str(error)})
        await asyncio.sleep(CLASS_SECONDS)


async def _operate(
    settings: Settings, app: App, kopf_stop: asyncio.Event, stop: asyncio.Event
) -> None:
    """Run kopf until one of its own tasks ends, and raise what ended it.

    kopf then ends the others, but where the API server is away at that moment it waits for them for
    ever, with all watches dead: it gets `EXIT_SECONDS`.
    """
    registry = kopf.OperatorRegistry()
    register(registry)
    memo = kopf.Memo()
    memo.app = app
    ready = asyncio.Event()

    async def take_signals_back() -> None:
        await ready.wait()
        _on_signal(stop)

    signals = asyncio.create_task(take_signals_back())
    existing = asyncio.all_tasks()
    parts = await kopf.spawn_tasks(
        registry=registry,
        memo=memo,
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        stop_flag=kopf_stop,
        ready_flag=ready,
    )
    ending = asyncio.create_task(kopf.run_tasks(parts, ignored=existing))
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        ended = [part for part in parts if part.done() and not part.cancelled()]
        await asyncio.wait([ending], timeout=EXIT_SECONDS)
    finally:
        ending.cancel()
        signals.cancel()
    for part in ended:
        part.result()


@contextlib.asynccontextmanager
async def _admin(settings: Settings, app: App, lease: Lease) -> AsyncIterator[None]:
    """Serve /metrics, /healthz and /readyz."""

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    async def healthz(_: web.Request) -> web.Response:
        problem = app.problem()
        if problem:
            return web.Response(status=503, text=f"{problem}\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="leading\n" if lease.time_left > 0 else "standing by\n")

    server = web.Application()
    server.router.add_get("/metrics", exposition)
    server.router.add_get("/healthz", healthz)
    server.router.add_get("/readyz", readyz)
    runner = web.AppRunner(server, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.bind, settings.metrics_port).start()
        logger.info("metrics", extra={"bind": settings.bind, "port": settings.metrics_port})
        yield
    finally:
        await runner.cleanup()


def _on_signal(stop: asyncio.Event) -> None:
    """Stop on SIGTERM and SIGINT. kopf sets handlers of its own when it starts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def _options(settings: Settings) -> Options:
    images = Images(pull_policy=settings.image_pull_policy, bind=settings.worker_bind)
    return Options(
        worker_image=settings.worker_image,
        cluster_domain=settings.cluster_domain,
        spare_seconds=settings.spare_seconds,
        plan=PlanOptions(images=images, operator_namespace=settings.lease_namespace),
    )


def _timing(settings: Settings) -> Timing:
    """Keep the proportions 15 : 10 : 2 of the three numbers."""
    whole = settings.lease_seconds
    return Timing(duration=whole, renew_deadline=whole * 2 / 3, retry=whole * 2 / 15)


def _log(settings: Settings) -> None:
    form: Any = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.PLAIN
    kopf.configure(verbose=settings.log_level == "DEBUG", log_format=form)
    logging.getLogger().setLevel(settings.log_level)
    # kopf says of every event that its handler succeeded; ours say what they did
    logging.getLogger("kopf.objects").setLevel(max(logging.WARNING, logging.getLogger().level))


if __name__ == "__main__":
    main()
