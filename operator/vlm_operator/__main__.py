"""The composition root: settings and the parts that they make. The only file that knows them all.

settings ─▶ lease, informers, loops, kopf ─▶ running.lead ─▶ exit status
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import kopf

from vlm_operator import kube, names
from vlm_operator.admin import admin
from vlm_operator.apply import Learned
from vlm_operator.cluster import CHILD_KINDS, NODE, POD, VLM_NODE_CLASS, Kind, Source
from vlm_operator.errors import OperatorError
from vlm_operator.framework import Watching
from vlm_operator.handlers import App
from vlm_operator.informer import Informed, Informer
from vlm_operator.leader import AT_ONCE, Aside, Fenced, Lease, Timing
from vlm_operator.plan import Network
from vlm_operator.plan import Options as PlanOptions
from vlm_operator.pods import Images
from vlm_operator.reconcile import ClassBook, ClassLoop, Loop, Options
from vlm_operator.running import Parts, lead, stop_on_signals
from vlm_operator.scrape import HttpScraper
from vlm_operator.settings import Settings
from vlm_operator.sight import Sight

logger = logging.getLogger("vlm_operator")


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
        loaded = [await kube.configuration(settings.kubeconfig) for _ in range(2)]
    except OperatorError as error:
        logger.error("no credentials", extra={"error": str(error)})
        return 2
    # the lease has a connection of its own, on a thread of its own: a renewal waits for nobody
    connection, aside_connection = (kube.KubeCluster(one) for one in loaded)
    lease = Lease(
        aside_connection,
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        identity=settings.identity,
        clock=time.monotonic,
        timing=_timing(settings),
    )
    scraper = HttpScraper()
    try:
        with Aside() as aside:
            parts = _parts(settings, loaded[0], connection, lease, aside, scraper)
            stop_on_signals(parts.stop)
            async with admin(
                settings.bind,
                settings.metrics_port,
                problem=parts.app.problem,
                leading=lambda: lease.time_left > 0,
            ):
                return await lead(parts)
    except OSError as error:
        logger.error("cannot listen", extra={"error": str(error)})
        return 1
    finally:
        await scraper.close()
        await connection.close()


def _parts(
    settings: Settings,
    loaded: Any,
    connection: kube.KubeCluster,
    lease: Lease,
    aside: Aside,
    scraper: HttpScraper,
) -> Parts:
    """Put everything together."""
    book, learned = ClassBook(), Learned()
    # hundreds of loops that wake together decide a few at a time: others get their turn between
    gate = asyncio.Semaphore(AT_ONCE)

    def told(service: tuple[str, str]) -> None:
        app.wake(*service)

    informers = {
        (kind, namespace): _informer(settings, connection, kind, namespace, told)
        for kind in (*CHILD_KINDS, POD, VLM_NODE_CLASS, NODE)
        for namespace in (settings.namespaces if kind.namespaced else ()) or (None,)
    }
    cluster = Informed(Fenced(connection, lease), informers)

    def make_loop(namespace: str, name: str) -> Loop:
        return Loop(
            namespace,
            name,
            cluster=cluster,
            scraper=scraper,
            options=_options(settings),
            clock=time.time,
            # not all at the same moment, and none later than promised
            resync=settings.resync_seconds * random.uniform(0.7, 1.0),  # noqa: S311
            epoch=lambda: lease.epoch,
            learned=learned,
            book=book,
            gate=gate,
        )

    app = App(
        make_loop=make_loop,
        connect=lambda: kube.connection(loaded),
        clock=time.monotonic,
        sight=Sight(time.monotonic),
        check=lease.check,
        watching=Watching(whole=settings.watch_seconds, silence=settings.silence_seconds),
    )
    return Parts(
        namespaces=settings.namespaces,
        app=app,
        classes=ClassLoop(
            cluster,
            book,
            clock=time.time,
            changed=app.wake_all,
            operator=f"{settings.lease_namespace}/{settings.lease_name}",
        ),
        informers=tuple(informers.values()),
        cluster=cluster,
        lease=lease,
        aside=aside,
        stop=asyncio.Event(),
        identity=settings.identity,
    )


def _informer(
    settings: Settings,
    source: Source,
    kind: Kind,
    namespace: str | None,
    told: Callable[[tuple[str, str]], None],
) -> Informer:
    return Informer(
        source,
        kind,
        namespace,
        labelled=names.LABEL_SERVICE if kind.namespaced else "",
        told=told,
        relist=settings.relist_seconds,
        silence=settings.silence_seconds,
    )


def _options(settings: Settings) -> Options:
    images = Images(pull_policy=settings.image_pull_policy, bind=settings.worker_bind)
    network = Network(
        operator_namespace=settings.lease_namespace,
        monitoring_namespace=settings.monitoring_namespace,
        api_server_ports=settings.api_server_ports,
        dns_namespace=settings.dns_namespace,
        dns_ports=settings.dns_ports,
    )
    return Options(
        worker_image=settings.worker_image,
        cluster_domain=settings.cluster_domain,
        spare_seconds=settings.spare_seconds,
        plan=PlanOptions(images=images, network=network),
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
