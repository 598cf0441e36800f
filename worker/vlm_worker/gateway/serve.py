"""A gateway process from its start to its last stream.

find workers ─▶ serve ─ SIGTERM ─▶ not ready ─▶ refuse ─▶ last stream ends, or is cut ─▶ return
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from vlm_worker.client import WorkerClient
from vlm_worker.gateway.app import admin_app, public_app
from vlm_worker.gateway.discovery import ApiServer, PodWatch
from vlm_worker.gateway.http import ConnectionBound, Server, server
from vlm_worker.gateway.memory import Bound
from vlm_worker.gateway.prompt import Language
from vlm_worker.gateway.registry import Connect, static_pods
from vlm_worker.gateway.service import Service
from vlm_worker.settings import GatewaySettings
from vlm_worker.wire.listening import listen

logger = logging.getLogger(__name__)

# Until Services have noticed that we are not ready, requests still come: they are served.
NOTICE_SECONDS = 2.0
LAST_WORDS_SECONDS = 5.0
MAX_ADMIN_CONNECTIONS = 256


class Gateway:
    """A running gateway; `running` makes one."""

    def __init__(self, service: Service, public: socket.socket, admin: socket.socket) -> None:
        self.service = service
        self._public = public
        self._admin = admin
        self._servers: list[Server] = []

    @property
    def url(self) -> str:
        """Of the OpenAI API."""
        return _url(self._public)

    @property
    def admin_url(self) -> str:
        """Of /stats and /metrics."""
        return _url(self._admin)

    async def serve(self, stop: asyncio.Event, *, notice_seconds: float = NOTICE_SECONDS) -> None:
        """Serve until `stop` is set, then drain; new requests are taken `notice_seconds` longer."""
        service = self.service
        clients = ConnectionBound(
            service.settings.max_connections, lambda: service.meters.refused(Bound.CONNECTIONS)
        )
        self._servers = [
            server(public_app(service), bound=clients),
            server(admin_app(service), bound=ConnectionBound(MAX_ADMIN_CONNECTIONS)),
        ]
        tasks = [
            asyncio.create_task(one.serve(sockets=[sock]))
            for one, sock in zip(self._servers, (self._public, self._admin), strict=True)
        ]
        logger.info("gateway serves", extra={"url": self.url, "admin_url": self.admin_url})
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
            await self._drain(notice_seconds)
        finally:
            stopping.cancel()
            for one in self._servers:
                one.should_exit = True
            await asyncio.gather(*tasks)

    async def _drain(self, notice_seconds: float) -> None:
        service = self.service
        service.draining = True
        logger.info("draining", extra={"inflight": service.num_inflight})
        timeout = service.settings.drain_timeout_seconds
        await asyncio.sleep(min(notice_seconds, timeout))
        service.refusing = True
        try:
            async with asyncio.timeout(timeout):
                await service.idle.wait()
        except TimeoutError:
            logger.warning("cut", extra={"inflight": service.num_inflight})
            service.cut.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await service.idle.wait()


@contextlib.asynccontextmanager
async def running(
    settings: GatewaySettings, *, connect: Connect = WorkerClient
) -> AsyncIterator[Gateway]:
    """Everything a gateway needs, set up and, in the end, taken down.

    `connect` makes its clients of workers.

    Raises:
        ModelConfigError: the model's files cannot be used.
        DiscoveryError: there is no cluster to watch.
        OSError: an address is taken.
    """
    service = Service(settings, Language(Path(settings.model.uri)), connect=connect)
    watch = None
    if not settings.workers:
        watch = PodWatch(
            ApiServer.in_cluster(settings.api_server),
            namespace=settings.namespace,
            service=settings.service,
            compat=settings.compat,
            on_pods=service.registry.apply,
            on_problem=service.note_discovery,
        )
    with (
        contextlib.closing(listen(settings.bind, settings.http_port)) as public,
        contextlib.closing(listen(settings.bind, settings.admin_port)) as admin,
    ):
        service.tasks.start("settings", service.live.watch)
        service.tasks.start("rates", service.tick)
        if watch is not None:
            service.tasks.start("pods", watch.run)
        service.registry.apply(static_pods(settings.workers))
        try:
            yield Gateway(service, public, admin)
        finally:
            await service.tasks.close()
            await service.background.finish()
            await service.registry.close()


async def serve_gateway(
    settings: GatewaySettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[Gateway], None] = lambda _: None,
) -> None:
    """Run a gateway until it is told to stop and its last stream has ended.

    Args:
        settings: of the command line.
        stop: set by the caller to end it; None = SIGTERM and SIGINT do.
        on_ready: gets the gateway, with its addresses, when it listens.
    """
    if stop is None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    if settings.delays:
        logger.warning("delays are injected: for tests alone", extra={"delays": settings.delays})
    async with running(settings) as gateway:
        on_ready(gateway)
        await gateway.serve(stop)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(host, host)  # noqa: S104 - to print
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
