"""Serves data connections for the producer: one fetch at a time per connection.

request ─▶ batches of frames, built on the loop ─▶ digests and bytes, on a thread ─▶ ending
the consumer closes ─▶ the running send is cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Final

from vlm_worker.errors import InvalidRequestError, WorkerError
from vlm_worker.settings.timers import Timers
from vlm_worker.supervision import AtEnd, Supervisor
from vlm_worker.transfer.thread_call import run_in_thread
from vlm_worker.wire.data_protocol import (
    LENGTH,
    MAX_REQUEST_BYTES,
    Fetch,
    request_of,
    send_batch,
    send_failure,
    send_nonblocking,
    shut_down,
)
from vlm_worker.wire.frames import FrameBatches
from vlm_worker.wire.messages import FetchCall
from vlm_worker.wire.sockets import data_connection, open_data_port

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_SECONDS: Final = 0.1
MAX_CONNECTIONS: Final = 256
"""Each connection has a thread while it sends, so a stalled consumer delays no other."""
MAX_ENDING: Final = 16
"""Connections beyond the limit that may open while idle ones are closed for them."""

Serve = Callable[[Fetch, FetchCall], FrameBatches]


class DataPort:
    """Listens and answers fetches with the frames of `serve`. Runs on one event loop."""

    def __init__(self, serve: Serve, timers: Timers, supervisor: Supervisor | None = None) -> None:
        self._serve = serve
        self._supervisor = supervisor or Supervisor()
        self._idle_seconds = timers.idle_connection
        self._send_seconds = timers.no_progress + timers.lease
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="data-send")
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._idle: dict[socket.socket, asyncio.Task[None]] = {}
        self.num_connections = 0

    def open(self, address: str, port: int) -> int:
        """Listen; returns the port. Raises OSError if the address cannot be bound."""
        self._listener = open_data_port(address, port)
        self._accepting = self._supervisor.start(
            functools.partial(self._accept, self._listener),
            name="accept data connections",
            at_end=AtEnd.FAIL,
        )
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._threads.shutdown(wait=False)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptors are left, or the peer has disconnected
                logger.warning("no data connection accepted", extra={"error": str(error)})
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if self.num_connections >= MAX_CONNECTIONS:
                self._end_one_idle()
            if self.num_connections < MAX_CONNECTIONS + MAX_ENDING:
                self._begin(connection)
            else:
                connection.close()  # the consumer falls back to gRPC

    def _end_one_idle(self) -> None:
        """Close the connection that is idle for longest, in favor of a new consumer."""
        oldest = next(iter(self._idle), None)
        if oldest is not None:
            self._idle.pop(oldest).cancel()

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection. It is closed even if its task is cancelled before it starts."""
        task = asyncio.create_task(self._serve_consumer(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: connection.close())

    async def _serve_consumer(self, connection: socket.socket) -> None:
        """Serve one consumer until it disconnects, is idle too long or violates the protocol."""
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        requests = _Requests(connection, on_disconnect=task.cancel)
        try:
            data_connection(connection, send_seconds=self._send_seconds)
            while True:
                self._idle[connection] = task
                try:
                    async with asyncio.timeout(self._idle_seconds):
                        request = await requests.next()
                finally:
                    self._idle.pop(connection, None)
                await self._answer(connection, request)
        except TimeoutError:
            logger.debug("idle data connection closed")
        except (OSError, InvalidRequestError) as error:
            logger.info("data connection ended", extra={"error": str(error)})
        finally:
            self.num_connections -= 1
            requests.close()

    async def _answer(self, connection: socket.socket, request: bytes) -> None:
        """Send the frames of one fetch, or the error that ended it."""
        try:
            async with aclosing(self._serve(*request_of(request))) as batches:
                async for batch in batches:
                    if not isinstance(batch, tuple):
                        await self._on_thread(connection, send_batch, batch)
                    elif rest := send_nonblocking(connection, batch):
                        await self._on_thread(connection, socket.socket.sendall, rest)
        except OSError:
            raise
        except Exception as error:
            if not isinstance(error, WorkerError):
                logger.exception("call failed", extra={"call": "data"})
            await self._on_thread(connection, send_failure, error)

    async def _on_thread(
        self, connection: socket.socket, send: Callable[[socket.socket, Any], None], what: Any
    ) -> None:
        """Send on a thread. If cancelled, wait for the thread, because it uses the buffers."""
        sending = run_in_thread(self._threads, send, connection, what)
        try:
            await sending.wait()
        except asyncio.CancelledError:
            shut_down(connection)
            with contextlib.suppress(asyncio.CancelledError):  # one is being raised
                await sending.end()
            raise
        sending.result()


class _Requests:
    """Reads the requests of a consumer; calls `on_disconnect` once."""

    def __init__(self, connection: socket.socket, *, on_disconnect: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_disconnect = on_disconnect
        self._data = bytearray()
        self._received = asyncio.Event()
        self._loop.add_reader(connection, self._read)

    async def next(self) -> bytes:
        """Raises InvalidRequestError if the request is too long."""
        while (request := self._take()) is None:
            self._received.clear()
            await self._received.wait()
        return request

    def close(self) -> None:
        self._loop.remove_reader(self._connection)

    def _take(self) -> bytes | None:
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > MAX_REQUEST_BYTES:
            raise InvalidRequestError(f"a data request of {length} bytes")
        end = LENGTH.size + length
        if len(self._data) < end:
            return None
        request = bytes(self._data[LENGTH.size : end])
        del self._data[:end]
        return request

    def _read(self) -> None:
        try:
            data = self._connection.recv(MAX_REQUEST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._data += data
        if not data or len(self._data) > 2 * MAX_REQUEST_BYTES:
            self.close()
            self._on_disconnect()
        self._received.set()
