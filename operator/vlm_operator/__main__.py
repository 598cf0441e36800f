"""The composition root: builds all parts from the settings. No other module imports them all.

settings ─▶ lease, informers, loops, kopf ─▶ running.lead ─▶ exit status
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import sys
import time
from typing import Any

import kopf

from vlm_operator import kube
from vlm_operator.admin import admin
from vlm_operator.apply.learned import Learned
from vlm_operator.autoscale.constants import CONSTANTS, parse_constants
from vlm_operator.cluster import CHILD_KINDS, NODE, POD, VLM_NODE_CLASS, Kind
from vlm_operator.errors import OperatorError
from vlm_operator.identity.authority import Authority
from vlm_operator.informer import CachedClient, Informer
from vlm_operator.kopf_events import Kopf, ServiceEvents
from vlm_operator.leader import AT_ONCE, BackgroundLoop, Fenced, Lease, Timing
from vlm_operator.plan.deployments import Options as PlanOptions
from vlm_operator.plan.policies import Network
from vlm_operator.pods.parts import Images
from vlm_operator.reconcile.class_and_pool_status import (
    NodeClassReconciler,
    NodeClassUsage,
    PoolLoop,
)
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.gate import Gate
from vlm_operator.reconcile.queue import Cause, Key
from vlm_operator.reconcile.service import ServiceReconciler
from vlm_operator.reconcile.workers import Workers
from vlm_operator.running import Parts, lead, stop_on_signals
from vlm_operator.scrape import HttpScraper
from vlm_operator.settings import Settings

logger = logging.getLogger("vlm_operator")


def main() -> None:
    """Run until a signal stops the process, or until another process leads."""
    settings = Settings.read(sys.argv[1:])
    _log(settings)
    status = asyncio.new_event_loop().run_until_complete(serve(settings))
    logging.shutdown()
    # tasks and threads of kopf that ignored the stop end here: a process that no longer leads or
    # watches must not keep running
    os._exit(status)


async def serve(settings: Settings) -> int:
    """Run the operator and return the exit status: 2 without credentials, 1 if it cannot listen."""
    try:
        loaded = [await kube.configuration(settings.kubeconfig) for _ in range(2)]
    except OperatorError as error:
        logger.error("no credentials", extra={"error": str(error)})
        return 2
    # the lease has a separate connection and thread, so that no other call delays a renewal
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
        with BackgroundLoop() as background:
            parts = _parts(settings, loaded[0], connection, lease, background, scraper)
            stop_on_signals(parts.stop)
            async with admin(
                settings.bind,
                settings.metrics_port,
                problem=parts.workers.problem,
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
    background: BackgroundLoop,
    scraper: HttpScraper,
) -> Parts:
    book, learned = NodeClassUsage(), Learned()
    # if hundreds of services wake at once, few decide at a time, so that others can progress
    gate = Gate(AT_ONCE)

    def notify(kind: Kind, service: Key) -> None:
        workers.notify(service, Cause.POD if kind == POD else Cause.CHILD)

    informers = {
        (kind, namespace): Informer(
            connection,
            kind,
            namespace,
            notify=functools.partial(notify, kind),
            relist=settings.relist_seconds,
            silence=settings.silence_seconds,
        )
        for kind in (*CHILD_KINDS, POD, VLM_NODE_CLASS, NODE)
        for namespace in (settings.namespaces if kind.namespaced else ()) or (None,)
    }
    cluster = CachedClient(Fenced(connection, lease), informers)

    authority = Authority(
        cluster, namespace=settings.lease_namespace, name=f"{settings.lease_name}-ca"
    )

    def make_reconciler(namespace: str, name: str) -> ServiceReconciler:
        return ServiceReconciler(
            namespace,
            name,
            cluster=cluster,
            scraper=scraper,
            options=_options(settings),
            clock=time.time,
            # jitter spreads the services; none exceeds `resync_seconds`
            resync=settings.resync_seconds * random.uniform(0.7, 1.0),  # noqa: S311
            epoch=lambda: lease.epoch,
            learned=learned,
            book=book,
            gate=gate,
            authority=authority,
        )

    workers = Workers(make_reconciler, clock=time.monotonic)
    return Parts(
        namespaces=settings.namespaces,
        workers=workers,
        kopf=Kopf(
            events=ServiceEvents(workers),
            connect=lambda: kube.connection(loaded),
            watch_seconds=settings.watch_seconds,
            silence_seconds=settings.silence_seconds,
        ),
        resync_seconds=settings.resync_seconds,
        classes=NodeClassReconciler(
            cluster,
            book,
            clock=time.time,
            changed=lambda: workers.notify_all(Cause.CLASS),
            operator=f"{settings.lease_namespace}/{settings.lease_name}",
        ),
        pools=PoolLoop(cluster, namespaces=settings.namespaces, clock=time.time),
        informers=tuple(informers.values()),
        cluster=cluster,
        lease=lease,
        background=background,
        stop=asyncio.Event(),
        identity=settings.identity,
    )


def _options(settings: Settings) -> Options:
    file = settings.autoscaler_constants
    images = Images(pull_policy=settings.image_pull_policy, bind=settings.worker_bind)
    network = Network(
        operator_namespace=settings.lease_namespace,
        monitoring_namespace=settings.monitoring_namespace,
        api_server_ports=settings.api_server_ports,
        dns_namespace=settings.dns_namespace,
        dns_ports=settings.dns_ports,
        model_sources=settings.model_sources,
        policies=settings.network_policies,
    )
    return Options(
        worker_image=settings.worker_image,
        gateway_image=settings.gateway_image,
        cluster_domain=settings.cluster_domain,
        spare_seconds=settings.spare_seconds,
        identity="" if settings.identity_mode == "Off" else settings.identity_mode,
        identity_check_seconds=settings.identity_check_seconds,
        constants=CONSTANTS if file is None else parse_constants(file.read_text()),
        plan=PlanOptions(images=images, network=network),
    )


def _timing(settings: Settings) -> Timing:
    """Return the lease's times in the proportion 15 : 10 : 2, as in client-go."""
    whole = settings.lease_seconds
    return Timing(duration=whole, renew_deadline=whole * 2 / 3, retry=whole * 2 / 15)


def _log(settings: Settings) -> None:
    form: Any = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.PLAIN
    kopf.configure(verbose=settings.log_level == "DEBUG", log_format=form)
    logging.getLogger().setLevel(settings.log_level)
    # kopf logs the success of each handler; our handlers log what they did
    logging.getLogger("kopf.objects").setLevel(max(logging.WARNING, logging.getLogger().level))


if __name__ == "__main__":
    main()
