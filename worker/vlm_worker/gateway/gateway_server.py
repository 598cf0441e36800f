"""Runs a gateway process: its HTTP servers, from start to the end of the last stream.

find workers ─▶ serve ─ SIGTERM ─▶ not ready ─▶ reject ─▶ last stream ends or is cut ─▶ return

uvicorn runs with sockets of this module, without signal handlers, with deadlines for slow clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vlm_worker.client import WorkerClient
from vlm_worker.gateway.api import errors
from vlm_worker.gateway.body import Receive
from vlm_worker.gateway.context import GatewayContext
from vlm_worker.gateway.discovery import ApiServer, PodWatch
from vlm_worker.gateway.http_app import OPEN_PATHS, admin_app, public_app
from vlm_worker.gateway.http_response import Response, Send
from vlm_worker.gateway.memory import Bound
from vlm_worker.gateway.pod_registry import Connect, static_pods
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.gateway.tls import Certificate
from vlm_worker.settings import GatewaySettings
from vlm_worker.supervision import AtEnd
from vlm_worker.types import Role
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.sockets import listen

logger = logging.getLogger(__name__)

# Requests arrive until Kubernetes Services see that the gateway is not ready: serve them.
NOTICE_SECONDS = 2.0
LAST_WORDS_SECONDS = 5.0
MAX_ADMIN_CONNECTIONS = 256


def most_connections(settings: GatewaySettings) -> int:
    """Return the limit on open connections: clients, probes and metrics readers."""
    return settings.max_connections + MAX_ADMIN_CONNECTIONS + 2 * SPARE_CONNECTIONS


class Gateway:
    """A gateway with bound sockets; `running` creates it.

    `url` is the URL of the OpenAI API, `admin_url` that of /stats and /metrics.
    """

    def __init__(
        self,
        context: GatewayContext,
        public: socket.socket,
        admin: socket.socket,
        certificate: Certificate | None = None,
    ) -> None:
        self.context = context
        self.url = _url(public, "http" if certificate is None else "https")
        self.admin_url = _url(admin, "http")
        self._tls = None if certificate is None else certificate.context
        self._sockets = (public, admin)
        self._servers: list[Server] = []

    async def serve(self, stop: asyncio.Event, *, notice_seconds: float = NOTICE_SECONDS) -> None:
        """Serve until `stop` is set, then drain; accept new requests for `notice_seconds` more.

        If the gateway has failed, requests end immediately instead.
        """
        context = self.context
        clients = ConnectionLimit(
            context.settings.max_connections, lambda: context.meters.refused(Bound.CONNECTIONS)
        )
        self._servers = [
            server(public_app(context), bound=clients, tls=self._tls),
            server(admin_app(context), bound=ConnectionLimit(MAX_ADMIN_CONNECTIONS)),
        ]
        tasks = [
            asyncio.create_task(one.serve(sockets=[sock]))
            for one, sock in zip(self._servers, self._sockets, strict=True)
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
        context = self.context
        context.draining = True
        logger.info("draining", extra={"inflight": context.num_inflight})
        timeout = context.settings.drain_timeout_seconds if context.failed is None else 0.0
        await asyncio.sleep(min(notice_seconds, timeout))
        context.refusing = True
        try:
            async with asyncio.timeout(timeout):
                await context.idle.wait()
        except TimeoutError:
            logger.warning("cut", extra={"inflight": context.num_inflight})
            context.drain_ended.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await context.idle.wait()


@contextlib.asynccontextmanager
async def running(
    settings: GatewaySettings, *, connect: Connect = WorkerClient
) -> AsyncIterator[Gateway]:
    """Set up a gateway and its tasks; on exit close them.

    `connect` creates the client of a worker.

    Raises:
        ModelConfigError: the model's files cannot be used.
        DiscoveryError: no workers are configured and the process does not run in a pod.
        OSError: an address is in use.
        ValueError: the certificate cannot be used.
        IdentityError: the directory of the identity cannot be used.
    """
    certificate = None if settings.tls_dir is None else Certificate(settings.tls_dir)
    identity = None
    if settings.identity_dir is not None:
        identity = IdentityStore(settings.identity_dir, Role.GATEWAY)
        connect = functools.partial(connect, identity=identity)
    context = GatewayContext(settings, PromptBuilder(Path(settings.model.uri)), connect=connect)
    context.meters.identity = identity
    watch = None
    if not settings.workers:
        watch = PodWatch(
            ApiServer.in_cluster(settings.api_server),
            namespace=settings.namespace,
            service=settings.service,
            compat=settings.compat,
            on_pods=context.registry.apply,
            on_problem=context.note_discovery,
            on_gateways=context.note_gateways,
        )
    with (
        contextlib.closing(listen(settings.bind, settings.http_port)) as public,
        contextlib.closing(listen(settings.bind, settings.admin_port)) as admin,
    ):
        tasks = context.tasks
        tasks.start(context.config_watcher.watch, name="settings", at_end=AtEnd.RESTART)
        tasks.start(context.tick, name="rates", at_end=AtEnd.RESTART)
        if certificate is not None:
            tasks.start(certificate.watch, name="certificate", at_end=AtEnd.RESTART)
        if identity is not None:
            tasks.start(identity.watch, name="identity", at_end=AtEnd.RESTART)
        if watch is not None:
            tasks.start(watch.run, name="pods", at_end=AtEnd.RESTART)
        if settings.workers:
            context.registry.apply(static_pods(settings.workers))
        try:
            yield Gateway(context, public, admin, certificate)
        finally:
            await tasks.close()
            if context.prefetcher is not None:
                await context.prefetcher.close()
            await context.registry.close()
            await context.fetcher.close()
            await asyncio.to_thread(context.preparer.grammar_checks.close)
            if context.tracer is not None:
                await asyncio.to_thread(context.tracer.close)


async def serve_gateway(
    settings: GatewaySettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[Gateway], None] = lambda _: None,
) -> None:
    """Run a gateway until `stop` is set and its last stream has ended.

    Without `stop`, SIGTERM and SIGINT end it. `on_ready` is called once its sockets listen.
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


def _url(sock: socket.socket, scheme: str) -> str:
    host, port = sock.getsockname()[:2]
    host = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(host, host)  # noqa: S104 - to print
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


HEADER_SECONDS = 10.0
# If a request is answered before its body ends, the rest is read and dropped for this time.
LINGER_SECONDS = 5.0
SPARE_CONNECTIONS: Final = 64
"""Connections beyond the limit, for probes. Any further connection is closed."""
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75
MAX_HEADERS: Final = 128
"""Headers per request. Each takes some hundred bytes of memory, however short it is."""
MAX_PIPELINED: Final = 16
"""Requests of a connection that wait for an earlier one. Each takes some KiB of memory."""
_FRAMING: Final = (b"content-length", b"transfer-encoding")
# Bytes per socket read. Copying and parsing them blocks the event loop.
READ_BYTES: Final = 64 * 1024


class Server(uvicorn.Server):
    """Server without signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers; `serve_gateway` installs them."""
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimit:
    """Limit on a server's connections; `on_refused` is called for each rejected one."""

    max_connections: int
    on_refused: Callable[[], None] = lambda: None


class HeaderTimeoutProtocol(HttpToolsProtocol):
    """Closes a connection if headers take over 10 s from its opening or their first byte.

    If a request is answered before its body ends, the connection is closed 5 s later, unless the
    rest of the body arrives. Connections beyond `max_connections` get answers to probes only.
    If a connection sends too many headers or pipelined requests, it gets a 400 and is closed.

    An offer to upgrade the connection is ignored, as RFC 9110 allows, and the request is served.
    Java's client and `curl --http2` offer an upgrade to HTTP/2.
    """

    _deadline: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _repeating_head = False
    bound: ConnectionLimit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES  # asyncio's default is four times larger
        num_beyond = len(self.connections) - self.bound.max_connections
        if num_beyond > SPARE_CONNECTIONS:
            self.bound.on_refused()
            transport.abort()
            return
        if num_beyond > 0:
            self.app = ConnectionLimitApp(self.app, self.bound)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _feed(self, data: bytes) -> bytes:
        """Parse `data`. After headers with an upgrade offer, return the unparsed rest."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade()
            return data[offer.args[0] :]
        return b""

    def _decline_upgrade(self) -> None:
        """Read the body of a request that offers an upgrade.

        httptools ends such a message after its headers. So a new parser gets a minimal head with
        the same framing headers, and then reads the body.
        """
        framing = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self.cycle.more_body = self._repeating_head = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        finally:
            self._repeating_head = False

    def on_message_begin(self) -> None:
        if self._repeating_head:
            return
        super().on_message_begin()
        self._num_header_bytes = 0
        self._expect_headers()

    def on_url(self, url: bytes) -> None:
        if not self._repeating_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Raises ValueError above a limit; uvicorn then answers 400 and closes the connection."""
        if self._repeating_head:
            return
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"more than {MAX_HEADER_BYTES} bytes of headers")
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the header deadline. Raises ValueError if too many requests are pipelined."""
        if self._repeating_head:
            return
        self._disarm()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests wait for the one before")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._repeating_head:
            self.cycle.more_body = False
            return
        self._end_linger()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """If the body of an answered request is incomplete, limit the wait for its rest."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger = self.loop.call_later(LINGER_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_linger()
        super().connection_lost(exc)

    def _end_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _expect_headers(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimitApp:
    """Serves a connection beyond the limit: answers probes and rejects other requests."""

    app: Any
    bound: ConnectionLimit

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:

        async def send_and_close(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send_and_close)
            return
        self.bound.on_refused()
        error = errors.unavailable(
            f"This gateway has {self.bound.max_connections} connections, all that it takes: close "
            "those that are idle, or retry later."
        )
        await Response(send_and_close).fail(error)


def server(app: Any, *, bound: ConnectionLimit, tls: ssl.SSLContext | None = None) -> Server:
    """Return a server for one application; `serve(sockets=[...])` runs it."""

    class Protocol(HeaderTimeoutProtocol):
        """The protocol with this server's limit."""

    Protocol.bound = bound
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    config.load()
    config.ssl = tls  # not by file names: this context can be reloaded
    return Server(config)
