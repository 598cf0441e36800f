"""uvicorn as we run it: our own sockets, no signals of its own, and patience with nobody."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vlm_worker.gateway.answering import Response, Send
from vlm_worker.gateway.api import errors
from vlm_worker.gateway.auth import OPEN_PATHS
from vlm_worker.gateway.body import Receive

HEADER_SECONDS = 10.0
# A request may be answered before its body ends: the rest is read, and dropped, for so long.
LINGER_SECONDS = 5.0
SPARE_CONNECTIONS: Final = 64
"""Beyond the bound, for probes; a connection more than these is closed at once."""
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75
# One read of a socket: others wait for the loop as long as it takes to copy and parse so much.
READ_BYTES: Final = 64 * 1024


class Server(uvicorn.Server):
    """A server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever started us handles them."""
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionBound:
    """How many connections a server takes, and who is told of each that it refuses."""

    max_connections: int
    on_refused: Callable[[], None] = lambda: None


class ImpatientProtocol(HttpToolsProtocol):
    """Closes a connection whose next headers do not come within 10 s of their first byte.

    If a request is answered before its body ends, the connection is closed 5 s later, unless the
    rest of the body came by then. Of connections beyond `max_connections`, only probes are served.
    """

    _deadline: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    bound: ConnectionBound

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES  # asyncio's own is four times as much
        num_beyond = len(self.connections) - self.bound.max_connections
        if num_beyond > SPARE_CONNECTIONS:
            self.bound.on_refused()
            transport.abort()
            return
        if num_beyond > 0:
            self.app = Crowded(self.app, self.bound)
        self._expect_headers()

    def on_message_begin(self) -> None:
        """A further request on the same connection begins."""
        super().on_message_begin()
        self._num_header_bytes = 0
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Raising here is answered 400 by uvicorn, and the connection is closed."""
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"more than {MAX_HEADER_BYTES} bytes of headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """They came."""
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole body came."""
        self._end_linger()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is complete; its request may not be."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger = self.loop.call_later(LINGER_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to wait for."""
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


class Crowded:
    """What a connection beyond the bound gets: probes are answered, all else is told to wait."""

    def __init__(self, app: Any, bound: ConnectionBound) -> None:
        self._app = app
        self._bound = bound

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request and close the connection."""

        async def send_and_close(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_and_close)
            return
        self._bound.on_refused()
        error = errors.unavailable(
            f"This gateway has {self._bound.max_connections} connections, all that it takes: close "
            "those that are idle, or come back later."
        )
        await Response(send_and_close).fail(error)


def server(app: Any, *, bound: ConnectionBound) -> Server:
    """A server for one application; `serve(sockets=[...])` runs it."""

    class Protocol(ImpatientProtocol):
        """With this server's bound."""

    Protocol.bound = bound
    return Server(
        uvicorn.Config(
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
    )
