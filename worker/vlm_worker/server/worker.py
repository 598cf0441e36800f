"""One worker process as a server: ports first, then the model, then work, then the drain.

open ─ LOADING ─ attach(parts) ─ READY ─ drain ─ DRAINING ─ empty, or the deadline ─ close
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from vlm_worker.client import WorkerClient
from vlm_worker.server.data_port import DataPort
from vlm_worker.server.http import HttpServer
from vlm_worker.server.local import LocalClient
from vlm_worker.server.meters import Meters
from vlm_worker.server.parts import Parts
from vlm_worker.server.service import Service
from vlm_worker.server.state import Phase, Snapshot, WorkerState
from vlm_worker.server.stats import stats_document
from vlm_worker.settings import WorkerSettings
from vlm_worker.settings.timers import Timers
from vlm_worker.transfer.supervising import Supervisor
from vlm_worker.wire.credentials import WARNING, add_port
from vlm_worker.wire.options import MAX_STREAMS, server_options

logger = logging.getLogger(__name__)

MONITOR_SECONDS: Final = 0.5
EMPTY_POLL_SECONDS: Final = 0.05
STOP_SECONDS: Final = 10.0
"""An engine that does not end its step within so long is left behind: the process ends anyway."""


class WorkerServer:
    """The ports of one worker, and what goes on behind them."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.state = WorkerState(settings)
        self.meters = Meters(self.state, self._snapshot)
        self.grpc_port = 0
        self.http_port = 0
        self.data_port = 0
        self._parts: Parts | None = None
        self._service = Service(self.state)
        self._supervisor = Supervisor(self._fail)
        self._data = DataPort(self._service.fetched, settings.timers, self._supervisor)
        self._health = HealthServicer()
        self._failed = asyncio.Event()
        self._http = HttpServer(
            stats=lambda: stats_document(self.state, self._snapshot()),
            exposition=self.meters.exposition,
            healthy=lambda: self.state.message if self.state.phase is Phase.FAILED else None,
            ready=lambda: None if self.state.serving else self.state.message,
        )
        self._grpc: Any = None

    async def open(self) -> None:
        """Listen on all ports; not ready yet.

        Raises:
            OSError: a port is taken, or the address is not ours.
        """
        settings = self.settings
        # on the loopback there is nobody to be warned of
        loopback = settings.bind.startswith("127.") or settings.bind == "::1"
        logger.log(logging.INFO if loopback else logging.WARNING, WARNING)
        if settings.delays:
            logger.warning("delays are injected, for tests", extra={"delays": settings.delays})
        self.http_port = await self._http.start(settings.bind, settings.http_port)
        self._grpc = grpc.aio.server(
            options=server_options(settings.timers), maximum_concurrent_rpcs=2 * MAX_STREAMS
        )
        self._grpc.add_generic_rpc_handlers(self._service.handlers())
        add_HealthServicer_to_server(self._health, self._grpc)
        self.grpc_port = add_port(self._grpc, settings.bind, settings.grpc_port)
        self.data_port = self._data.open(settings.bind, settings.data_port)
        self._service.data_port = settings.announced_data_port or self.data_port
        await self._set_health(serving=False)
        await self._grpc.start()

    async def attach(self, parts: Parts) -> None:
        """The model is there: take work."""
        self._parts = parts
        self._service.parts = parts
        parts.host.start()
        self.state.enter(Phase.READY, "ready")
        await self._set_health(serving=True)
        self._supervisor.start(self._watch(parts), name="watch the engine", may_end=True)

    async def failed(self) -> None:
        """Wait until this process cannot go on: its engine or a task that it needs has failed."""
        await self._failed.wait()

    async def drain(self) -> None:
        """Take no new work and finish; at the deadline end what is left, each with a last word."""
        if self._parts is None:
            return
        parts, timeout = self._parts, self.settings.drain_timeout_seconds
        parts.host.accepting = False
        self.state.enter(Phase.DRAINING, "draining")
        logger.info("draining", extra={"inflight": parts.host.num_inflight, "timeout": timeout})
        if await self._empty_within(parts, timeout):
            return
        num_ended = await parts.engine.drain()
        logger.warning("drain deadline", extra={"ended": num_ended})
        await self._empty_within(parts, self.settings.timers.last_words)

    async def close(self) -> None:
        """Close all ports and stop what runs behind them."""
        await self._supervisor.close()
        if self._grpc is not None:
            await self._set_health(serving=False)
            await self._grpc.stop(grace=0.5)
        await self._data.close()
        if self._parts is not None:
            await _close(self._parts)
        await self._http.stop()

    def connect(self, address: str, *, timers: Timers) -> WorkerClient:
        """The client of this worker for a gateway in this process."""
        return LocalClient(address, timers=timers, service=self._service)

    @property
    def left(self) -> dict[str, int]:
        """All that has not come back, by what it is, calls included; empty at rest."""
        live = {f"{n} calls": c for n, c in self._service.live.items() if c and n != "WatchLoad"}
        return {**live, **(self._parts.left if self._parts is not None else {})}

    @property
    def num_violations(self) -> int:
        """Broken promises of its books so far; 0, or there is a defect."""
        snapshot = self._snapshot()
        return snapshot.engine.invariant_violations if snapshot is not None else 0

    def _snapshot(self) -> Snapshot | None:
        return self._parts.snapshot() if self._parts is not None else None

    async def _set_health(self, *, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse.ServingStatus
        status = kind.SERVING if serving else kind.NOT_SERVING
        names = {"", self.settings.role.value, *(s.value for s in self.settings.stages)}
        for name in names:
            await self._health.set(name, status)

    async def _watch(self, parts: Parts) -> None:
        """A dead engine, or memory that cannot be used again, fails the process: start anew."""
        while (complaint := parts.complaint) is None:
            self.state.beat(parts.engine.stats())
            await asyncio.sleep(MONITOR_SECONDS)
        self._fail(complaint)
        await self._set_health(serving=False)

    def _fail(self, complaint: str) -> None:
        """This process cannot go on: neither healthy nor ready, and whoever waits ends it."""
        self.state.enter(Phase.FAILED, complaint)
        logger.error(complaint)
        self._failed.set()

    async def _empty_within(self, parts: Parts, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not parts.empty:
            if time.monotonic() >= deadline or not parts.engine.healthy:
                return False
            await asyncio.sleep(EMPTY_POLL_SECONDS)
        return True


async def _close(parts: Parts) -> None:
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await parts.host.close()
            await parts.engine.stop()
    except TimeoutError:
        logger.exception("the engine is stuck")
    except Exception:
        logger.exception("the engine had failed")
