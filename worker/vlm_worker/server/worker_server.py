"""The ports of one worker process: open them, attach the loaded model, serve, drain.

open ─ LOADING ─ attach(components) ─ READY ─ drain ─ DRAINING ─ empty, or the deadline ─ close

`/stats`, `/metrics`, `/healthz` and `/readyz` answer before the model is loaded.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
from aiohttp import web
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from vlm_worker.client import WorkerClient
from vlm_worker.server.components import WorkerComponents
from vlm_worker.server.data_port import DataPort
from vlm_worker.server.metrics import CONTENT_TYPE, WorkerMetrics, stats_document
from vlm_worker.server.service import LocalClient, Service
from vlm_worker.server.state import Phase, Snapshot, WorkerState
from vlm_worker.settings import WorkerSettings
from vlm_worker.settings.timers import Timers
from vlm_worker.supervision import AtEnd, Supervisor, Work
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.rpc import MAX_STREAMS, server_options
from vlm_worker.wire.sockets import WARNING, add_port, listen

logger = logging.getLogger(__name__)

MONITOR_SECONDS: Final = 0.5
EMPTY_POLL_SECONDS: Final = 0.05
STOP_SECONDS: Final = 10.0
"""If the engine does not end its step within this time, the process ends without it."""


class WorkerServer:
    """The ports of one worker process and its tasks."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.state = WorkerState(settings)
        self.meters = WorkerMetrics(self.state, self._snapshot)
        self.grpc_port = 0
        self.http_port = 0
        self.data_port = 0
        self._components: WorkerComponents | None = None
        directory = settings.identity_dir
        self.identity = IdentityStore(directory, settings.role) if directory else None
        self.state.identity = self.identity
        self._service = Service(self.state, self.identity)
        if settings.trace_ratio:
            from vlm_worker.tracing import Tracer

            self._service.tracer = Tracer(
                settings.identity, settings.role, ratio=settings.trace_ratio
            )
        self._supervisor = Supervisor(self._fail)
        self._data = DataPort(
            self._service.fetch, settings.timers, self._supervisor, identity=self.identity
        )
        self._health = _Health(self._service)
        self._failed = asyncio.Event()
        self._http = HttpServer(
            stats=lambda: stats_document(self.state, self._snapshot()),
            exposition=self.meters.exposition,
            healthy=lambda: self.state.message if self.state.phase is Phase.FAILED else None,
            ready=lambda: None if self.state.serving else self.state.message,
        )
        self._grpc: Any = None

    async def open(self) -> None:
        """Listen on all ports. The worker is not ready yet.

        Raises:
            OSError: a port is in use, or the address is not local.
        """
        settings = self.settings
        # on the loopback address no other host can connect, so the line is no warning
        loopback = settings.bind.startswith("127.") or settings.bind == "::1"
        if self.identity is None:
            logger.log(logging.INFO if loopback else logging.WARNING, WARNING)
        else:
            self._supervisor.start(
                self.identity.watch, name="watch the identity", at_end=AtEnd.RESTART
            )
        if settings.delays:
            logger.warning("delays are injected, for tests", extra={"delays": settings.delays})
        self.http_port = await self._http.start(settings.bind, settings.http_port)
        self._grpc = grpc.aio.server(
            options=server_options(settings.timers), maximum_concurrent_rpcs=2 * MAX_STREAMS
        )
        self._grpc.add_generic_rpc_handlers(self._service.handlers())
        add_HealthServicer_to_server(self._health, self._grpc)
        self.grpc_port = add_port(
            self._grpc, settings.bind, settings.grpc_port, identity=self.identity
        )
        self.data_port = self._data.open(settings.bind, settings.data_port)
        self._service.data_port = settings.announced_data_port or self.data_port
        await self._set_health(serving=False)
        await self._grpc.start()

    async def attach(self, components: WorkerComponents) -> None:
        """Set the components of the loaded model and accept work."""
        self._components = components
        self._service.components = components
        components.context.start()
        found = self.state.verification
        verified = "" if found is None else f", verified: {found.attends}, {found.difference:.1e}"
        self.state.enter(Phase.READY, f"ready{verified}")
        await self._set_health(serving=True)
        self._supervisor.start(
            functools.partial(self._watch, components), name="watch the engine", at_end=AtEnd.RETURN
        )

    def keep(self, work: Work, *, name: str) -> None:
        """Run `work` until `close`. If it fails, the process has failed."""
        self._supervisor.start(work, name=name, at_end=AtEnd.RETURN)

    async def failed(self) -> None:
        """Wait until the process fails: its engine or a required task has failed."""
        await self._failed.wait()

    async def drain(self) -> None:
        """Accept no new work and finish the rest. At the deadline, end remaining requests.

        Each ended request gets an error.
        """
        if self._components is None:
            return
        components, timeout = self._components, self.settings.drain_timeout_seconds
        components.context.accepting = False
        self.state.enter(Phase.DRAINING, "draining")
        logger.info(
            "draining", extra={"inflight": components.context.num_inflight, "timeout": timeout}
        )
        if await self._empty_within(components, timeout):
            return
        num_ended = await components.engine.drain()
        logger.warning("drain deadline", extra={"ended": num_ended})
        await self._empty_within(components, self.settings.timers.last_words)

    async def close(self) -> None:
        await self._supervisor.close()
        if self._grpc is not None:
            await self._set_health(serving=False)
            await self._grpc.stop(grace=0.5)
        await self._data.close()
        if self._components is not None:
            await _close(self._components)
        await self._http.stop()
        if self._service.tracer is not None:
            await asyncio.to_thread(self._service.tracer.close)

    def connect(self, address: str, *, timers: Timers) -> WorkerClient:
        """A client for a gateway in this process."""
        return LocalClient(address, timers=timers, service=self._service)

    def _snapshot(self) -> Snapshot | None:
        return self._components.snapshot() if self._components is not None else None

    async def _set_health(self, *, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse.ServingStatus
        status = kind.SERVING if serving else kind.NOT_SERVING
        names = {"", self.settings.role.value, *(s.value for s in self.settings.stages)}
        for name in names:
            await self._health.set(name, status)

    async def _watch(self, components: WorkerComponents) -> None:
        """Record heartbeats. If the worker becomes unhealthy, fail the process."""
        while (reason := components.unhealthy_reason) is None:
            self.state.record_heartbeat(components.engine.stats())
            await asyncio.sleep(MONITOR_SECONDS)
        self._fail(reason)
        await self._set_health(serving=False)

    def _fail(self, reason: str) -> None:
        """Mark the process as failed, neither healthy nor ready, and wake `failed`."""
        self.state.enter(Phase.FAILED, reason)
        logger.error(reason)
        self._failed.set()

    async def _empty_within(self, components: WorkerComponents, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not components.empty:
            if time.monotonic() >= deadline or not components.engine.healthy:
                return False
            await asyncio.sleep(EMPTY_POLL_SECONDS)
        return True


async def _close(components: WorkerComponents) -> None:
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await components.context.close()
            await components.engine.stop()
    except TimeoutError:
        logger.exception("the engine is stuck")
    except Exception:
        logger.exception("the engine had failed")


class _Health(HealthServicer):  # type: ignore[misc]
    """gRPC's health service; with mutual TLS only for identities of the service."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._service.authorize_health(context)
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        await self._service.authorize_health(context)
        await super().Watch(request, context)


class HttpServer:
    """Serves /stats, /metrics, /healthz and /readyz; a function builds each answer on request.

    Args:
        stats: returns the document of `/stats`.
        exposition: returns the metrics in Prometheus' text format.
        healthy: returns None, or why this process should be restarted.
        ready: returns None, or why it should get no traffic.
    """

    def __init__(
        self,
        *,
        stats: Callable[[], dict[str, Any]],
        exposition: Callable[[], bytes],
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
    ) -> None:
        async def get_stats(_: web.Request) -> web.Response:
            return web.json_response(stats())

        async def get_metrics(_: web.Request) -> web.Response:
            return web.Response(body=exposition(), headers={"Content-Type": CONTENT_TYPE})

        app = web.Application()
        app.router.add_get("/stats", get_stats)
        app.router.add_get("/metrics", get_metrics)
        app.router.add_get("/healthz", _verdict(healthy))
        app.router.add_get("/readyz", _verdict(ready))
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError if the address cannot be bound."""
        await self._runner.setup()
        site = web.SockSite(self._runner, listen(host, port))
        await site.start()
        address: tuple[Any, ...] = self._runner.addresses[0]
        return int(address[1])

    async def stop(self) -> None:
        await self._runner.cleanup()


def _verdict(problem: Callable[[], str | None]) -> Any:
    async def handler(_: web.Request) -> web.Response:
        reason = problem()
        return web.Response(text=reason or "ok", status=200 if reason is None else 503)

    return handler
