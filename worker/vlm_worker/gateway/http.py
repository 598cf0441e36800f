"""uvicorn as we run it: our own sockets, no signals of its own, and patience with nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 10.0
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """A server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever started us handles them."""
        yield


class ImpatientProtocol(HttpToolsProtocol):
    """Closes a connection whose next headers do not come within 10 s of their first byte."""

    _deadline: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
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

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to wait for."""
        self._disarm()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def server(app: Any) -> Server:
    """A server for one application; `serve(sockets=[...])` runs it."""
    return Server(
        uvicorn.Config(
            app,
            http=ImpatientProtocol,
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
