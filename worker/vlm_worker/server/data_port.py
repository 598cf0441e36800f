"""Serves data connections for the producer: one fetch at a time per connection.

handshake, if workers have identities ─▶ the peer must be one that may fetch
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

from vlm_worker.errors import InvalidRequestError, UnauthorizedError, WorkerError
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
    send_rest,
    shut_down,
)
from vlm_worker.wire.frames import FrameBatches
from vlm_worker.wire.identity import refusal
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall
from vlm_worker.wire.secure_connection import DataConnection, SecureConnection, raw_of
from vlm_worker.wire.sockets import accept_data_connection, open_data_port

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_SECONDS: Final = 0.1
MAX_CONNECTIONS: Final = 256
"""Each connection has a thread while it sends, so a stalled consumer delays no other."""
MAX_ENDING: Final = 16
"""Connections beyond the limit that may open while idle ones are closed for them."""

Serve = Callable[[Fetch, FetchCall], FrameBatches]


class DataPort:
    """Listens and answers fetches with the frames of `serve`. Runs on one event loop.

    With `identity`, each connection needs a certificate of a role that may fetch, and each fetch is
    authorised as over gRPC. A new certificate of this process ends a connection after its fetch.
    """

    def __init__(
        self,
        serve: Serve,
        timers: Timers,
        supervisor: Supervisor | None = None,
        *,
        identity: IdentityStore | None = None,
    ) -> None:
        self._serve = serve
        self._timers = timers
        self._identity = identity
        self._supervisor = supervisor or Supervisor()
        self._send_seconds = timers.no_progress + timers.lease
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="data-send")
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._unproven: dict[socket.socket, asyncio.Task[None]] = {}
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
        """Close a connection in favor of a new consumer.

        It is the one whose handshake takes longest, or else the one that is idle for longest.
        """
        for waiting in (self._unproven, self._idle):
            oldest = next(iter(waiting), None)
            if oldest is not None:
                waiting.pop(oldest).cancel()
                return

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection. It is closed even if its task is cancelled before it starts."""
        task = asyncio.create_task(self._serve_consumer(connection))
        self.num_connections += 1  # several may be accepted before the first task starts
        self._tasks.add(task)
        if self._identity is not None:
            self._unproven[connection] = task

        def end(_: asyncio.Task[None]) -> None:
            connection.close()
            self.num_connections -= 1
            self._tasks.discard(task)
            self._unproven.pop(connection, None)

        task.add_done_callback(end)

    async def _serve_consumer(self, accepted: socket.socket) -> None:
        """Serve one consumer until it disconnects, is idle too long or violates the protocol."""
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = await self._admit(accepted)
            if connection is not None:
                await self._answer_all(connection, task)
        except TimeoutError:
            logger.debug("idle data connection closed")
        except (OSError, InvalidRequestError) as error:
            logger.info("data connection ended", extra={"error": str(error)})

    async def _admit(self, accepted: socket.socket) -> DataConnection | None:
        """A connection whose peer may fetch; None if it may not. Only the log says why."""
        try:
            connection = await accept_data_connection(
                accepted, self._timers, self._identity, send_seconds=self._send_seconds
            )
            reasons = [self._refusal(fetch, connection) for fetch in Fetch]
            if all(reasons):
                raise PermissionError(reasons[0])
        except OSError as error:
            if self._identity is None:
                raise
            logger.warning("data connection refused", extra={"reason": str(error)})
            return None
        finally:
            self._unproven.pop(accepted, None)
        return connection

    def _refusal(self, fetch: Fetch, connection: DataConnection) -> str | None:
        """Why the peer may not fetch this; None if it may."""
        if self._identity is None:
            return None
        assert isinstance(connection, SecureConnection)
        return refusal(fetch.method, connection.peer, self._identity.now.identity)

    def _may_serve_another(self, connection: DataConnection) -> bool:
        if self._identity is None:
            return True
        assert isinstance(connection, SecureConnection)
        return connection.may_serve_another(self._identity.now.generation)

    async def _answer_all(self, connection: DataConnection, task: asyncio.Task[None]) -> None:
        """Answer fetch after fetch; raises TimeoutError if there is none for too long."""
        raw = raw_of(connection)
        requests = _Requests(connection, on_disconnect=task.cancel)
        try:
            while True:
                self._idle[raw] = task
                try:
                    async with asyncio.timeout(self._timers.idle_connection):
                        request = await requests.next()
                finally:
                    self._idle.pop(raw, None)
                await self._answer(connection, request)
                if not self._may_serve_another(connection):
                    return
        finally:
            requests.close()

    async def _answer(self, connection: DataConnection, request: bytes) -> None:
        """Send the frames of one fetch, or the error that ended it."""
        try:
            fetch, call = request_of(request)
            if reason := self._refusal(fetch, connection):
                logger.warning("call refused", extra={"call": fetch.method, "reason": reason})
                raise UnauthorizedError(reason)
            async with aclosing(self._serve(fetch, call)) as batches:
                async for batch in batches:
                    if not isinstance(batch, tuple):
                        await self._on_thread(connection, send_batch, batch)
                    elif rest := send_nonblocking(connection, batch):
                        await self._on_thread(connection, send_rest, rest)
        except OSError:
            raise
        except Exception as error:
            if not isinstance(error, WorkerError):
                logger.exception("call failed", extra={"call": "data"})
            await self._on_thread(connection, send_failure, error)

    async def _on_thread(
        self, connection: DataConnection, send: Callable[[DataConnection, Any], None], what: Any
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
    """Reads the requests of a consumer; calls `on_disconnect` once.

    While a thread encrypts a fetch, bytes are received and not decrypted.
    """

    def __init__(self, connection: DataConnection, *, on_disconnect: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._secure = connection if isinstance(connection, SecureConnection) else None
        self._connection = raw_of(connection)
        self._on_disconnect = on_disconnect
        self._arrived = bytearray()
        self._data = bytearray()
        self._received = asyncio.Event()
        self._loop.add_reader(self._connection, self._read)

    async def next(self) -> bytes:
        """Call it between fetches.

        Raises:
            InvalidRequestError: the request is too long.
            OSError: what arrived is no record of this connection.
        """
        while (request := self._take()) is None:
            self._received.clear()
            await self._received.wait()
        return request

    def close(self) -> None:
        self._loop.remove_reader(self._connection)

    def _take(self) -> bytes | None:
        arrived, self._arrived = self._arrived, bytearray()
        self._data += arrived if self._secure is None else self._secure.decrypt(arrived)
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
        self._arrived += data
        if not data or len(self._arrived) + len(self._data) > 2 * MAX_REQUEST_BYTES:
            self.close()
            self._on_disconnect()
        self._received.set()
