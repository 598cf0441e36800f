"""The producer's side of data connections: one fetch at a time on each, on a thread while it sends.

request ─▶ runs of frames, made on the loop ─▶ digests and bytes, on a thread ─▶ ending
the consumer closes ─▶ what is being sent for it ends
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Final

from vlm_worker.errors import InvalidRequestError, WorkerError
from vlm_worker.settings.timers import Timers
from vlm_worker.transfer.running import started
from vlm_worker.transfer.supervising import Supervisor
from vlm_worker.wire.calls import FetchCall
from vlm_worker.wire.credentials import data_connection, open_data_port
from vlm_worker.wire.data import (
    LENGTH,
    MAX_REQUEST_BYTES,
    Fetch,
    request_of,
    send_failure,
    send_now,
    send_rest,
    send_run,
    shut,
)
from vlm_worker.wire.frames import Runs

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_SECONDS: Final = 0.1
MAX_CONNECTIONS: Final = 256
"""Each has a thread while it sends: nobody waits for a consumer that stands still."""
MAX_ENDING: Final = 16
"""Connections that may begin while idle ones are being closed for them."""

Serve = Callable[[Fetch, FetchCall], Runs]


class DataPort:
    """Listens, and serves every connection from `serve`. On one event loop; `close` it."""

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
        """Listen; returns the port. Raises OSError where that cannot be."""
        self._listener = open_data_port(address, port)
        self._accepting = self._supervisor.start(
            self._accept(self._listener), name="accept data connections"
        )
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._threads.shutdown(wait=False)

    def _run(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or it was gone before we came
                logger.warning("no data connection accepted", extra={"error": str(error)})
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if self.num_connections >= MAX_CONNECTIONS:
                self._end_one_idle()
            if self.num_connections < MAX_CONNECTIONS + MAX_ENDING:
                self._begin(connection)
            else:
                connection.close()  # its fetches go over gRPC

    def _end_one_idle(self) -> None:
        """Close the connection that asked for nothing for longest: a new consumer needs it more."""
        oldest = next(iter(self._idle), None)
        if oldest is not None:
            self._idle.pop(oldest).cancel()

    def _begin(self, connection: socket.socket) -> None:
        """Talk; it is closed in the end, even where the port closes before its task has begun."""
        self._run(self._talk(connection)).add_done_callback(lambda _: connection.close())

    async def _talk(self, connection: socket.socket) -> None:
        """Serve one consumer until it leaves, or does not keep to the protocol."""
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        requests = _Requests(connection, on_left=task.cancel)
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
        """Frames as long as their consumer takes them, or why there are none."""
        try:
            async with aclosing(self._serve(*request_of(request))) as runs:
                async for run in runs:
                    if not isinstance(run, tuple):
                        await self._on_thread(connection, send_run, run)
                    elif rest := send_now(connection, run):
                        await self._on_thread(connection, send_rest, rest)
        except OSError:
            raise
        except Exception as error:
            if not isinstance(error, WorkerError):
                logger.exception("call failed", extra={"call": "data"})
            await self._on_thread(connection, send_failure, error)

    async def _on_thread(
        self, connection: socket.socket, send: Callable[[socket.socket, Any], None], what: Any
    ) -> None:
        """Send; returns no earlier, not even when cancelled: a thread uses what we own."""
        sending = started(self._threads, send, connection, what)
        try:
            await sending.wait()
        except asyncio.CancelledError:
            shut(connection)
            with contextlib.suppress(asyncio.CancelledError):  # there is one already
                await sending.end()
            raise
        sending.result()


class _Requests:
    """What a consumer asks for, one by one. `on_left` is called once, when it has closed."""

    def __init__(self, connection: socket.socket, *, on_left: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_left = on_left
        self._data = bytearray()
        self._came = asyncio.Event()
        self._loop.add_reader(connection, self._read)

    async def next(self) -> bytes:
        """The next request.

        Raises:
            InvalidRequestError: it is too long.
        """
        while (request := self._take()) is None:
            self._came.clear()
            await self._came.wait()
        return request

    def close(self) -> None:
        """Listen no more."""
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
            self._on_left()
        self._came.set()
