"""The consumer side of data connections: fetches from one worker, one thread each.

    port, from the metadata of a fetch over gRPC ─▶ is_usable ─▶ units(...): validated in the thread
    no answer ─▶ UnreachableError ─▶ not usable for a while; the fetch uses gRPC

A connection is reused after a complete fetch. Any other is closed, which tells the producer that
the consumer no longer reads. With mutual TLS, the producer must have the identity that it has on
its gRPC port, and a connection is not reused after a new certificate. A few rows in shared memory
are copied on the event loop, once their frames have arrived: two thread wakeups would cost as much.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Final

from vlm_worker.errors import PeerLostError
from vlm_worker.settings.timers import Timers
from vlm_worker.transfer.consumer import MAX_PENDING_BATCHES, ReceiveChannel
from vlm_worker.transfer.shared_memory import NAME as SHARED_MEMORY
from vlm_worker.transfer.thread_call import run_in_thread
from vlm_worker.wire.data_protocol import (
    Fetch,
    is_readable,
    receive_units,
    request_to,
    send_request,
    shut_down,
    wait_for_answer,
)
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Units
from vlm_worker.wire.identity import ServiceIdentity
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall
from vlm_worker.wire.secure_connection import DataConnection, SecureConnection
from vlm_worker.wire.sockets import open_data_connection

MAX_FETCHES: Final = 64
"""Concurrent fetches over data connections, each with a thread. Others use gRPC."""
MAX_IDLE: Final = 4
MAX_AT_ONCE_BYTES: Final = 8 << 20
"""Units in shared memory up to this size are copied on the loop, faster than two wakeups."""
AT_ONCE_SECONDS: Final = 0.005
"""Then a thread takes over, which detects a lost producer."""
UNREACHABLE_SECONDS: Final = 60.0
"""An unreachable port, perhaps blocked by a firewall, is not tried again for this time."""


class UnreachableError(Exception):
    """No data connection could be opened; no byte was read."""


class FetchThreads:
    """The threads of all data connections of a worker: one for each fetch in flight."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="data-fetch")
        self.num_busy = 0

    def close(self) -> None:
        """Stop the pool; a fetch ends when its connection is closed."""
        self.pool.shutdown(wait=False)


class DataConnectionPool:
    """Data connections to one worker, on one event loop. Call `learn` with its port first.

    With `identity`, all connections use mutual TLS, and `learn` must tell whom to expect.
    """

    def __init__(
        self,
        address: str,
        threads: FetchThreads,
        timers: Timers,
        *,
        identity: IdentityStore | None = None,
    ) -> None:
        self._identity = identity
        self._peer: ServiceIdentity | None = None
        self._port: int | None = None
        self._address = address
        self._host = address.rpartition(":")[0].strip("[]")
        self._threads = threads
        self._timers = timers
        self._idle: list[DataConnection] = []
        self._busy: set[DataConnection] = set()
        self._unreachable_until = 0.0
        self._closed = False

    @property
    def is_usable(self) -> bool:
        return (
            self._port is not None
            and (self._identity is None or self._peer is not None)
            and not self._closed
            and self._threads.num_busy < MAX_FETCHES
            and time.monotonic() >= self._unreachable_until
        )

    def learn(self, port: int | None, peer: ServiceIdentity | None = None) -> None:
        """Set the worker's data port; None if it has none. `peer` is its identity on gRPC."""
        if (port, peer) != (self._port, self._peer):
            self._port, self._peer, self._unreachable_until = port, peer, 0.0

    async def units(
        self, fetch: Fetch, call: FetchCall, reader: FrameReader
    ) -> AsyncGenerator[Units]:
        """Whole units as they arrive; after them, the reader has the `commit`.

        Raises:
            UnreachableError: no connection accepted the request.
            WorkerError: what the producer raised, or the reader.
        """
        self._threads.num_busy += 1  # before other fetches check for a free thread
        try:
            connection = await self._send(request_to(fetch, call))
        except BaseException:
            self._threads.num_busy -= 1
            raise
        self._busy.add(connection)
        has_ended = False
        try:
            if _may_be_short(call, reader) and await _is_readable_soon(connection):
                self._check(lambda: receive_units(connection, reader, self._address))
            else:
                async with aclosing(self._by_thread(connection, reader)) as all_units:
                    async for units in all_units:
                        yield units
            has_ended = True
        finally:
            reader.close()
            self._busy.discard(connection)
            self._threads.num_busy -= 1
            is_reusable = has_ended and not self._closed and self._may_serve_another(connection)
            if is_reusable and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close all connections; a fetch in flight ends as if the worker were lost."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        for connection in self._busy:
            shut_down(connection)

    def _may_serve_another(self, connection: DataConnection) -> bool:
        if self._identity is None:
            return True
        return (
            isinstance(connection, SecureConnection)
            and connection.peer == self._peer
            and connection.may_serve_another(self._identity.now.generation)
        )

    async def _by_thread(
        self, connection: DataConnection, reader: FrameReader
    ) -> AsyncGenerator[Units]:
        """Units that a thread receives; the thread has ended when the iteration ends."""
        assembler = reader.assembler
        channel = (
            ReceiveChannel(max_pending=None if assembler.into else MAX_PENDING_BATCHES)
            if assembler.reports_progress
            else None
        )
        running = run_in_thread(
            self._threads.pool, _receive_all, connection, reader, self._address, channel
        )
        has_ended = is_late = False

        def expire() -> None:
            nonlocal is_late
            is_late = True
            shut_down(connection)  # wakes a reading thread

        deadline = asyncio.get_running_loop().call_later(self._timers.fetch, expire)
        try:
            if channel is not None:
                async with aclosing(channel.units()) as all_units:
                    async for units in all_units:
                        yield units
            await running.wait()
            self._check(running.result, is_late=is_late)
            has_ended = True
        finally:
            deadline.cancel()
            if not has_ended:
                shut_down(connection)
            if channel is not None:
                channel.give_up()
            await running.end()  # before the connection is reused or closed

    async def _send(self, request: bytes) -> DataConnection:
        """Send the request on an idle connection that is open, or on a new one; returns it."""
        while self._idle:
            connection = self._idle.pop()
            if (
                self._may_serve_another(connection)
                and _is_open(connection)
                and send_request(connection, request)
            ):
                return connection
            connection.close()
        secured = None
        if self._identity is not None:
            assert self._peer is not None, "is_usable was checked"
            secured = self._identity.now, self._peer
        try:
            connection = await open_data_connection(
                self._host, self._port or 0, self._timers, secured
            )
            if send_request(connection, request):
                return connection
            connection.close()
            raise ConnectionResetError("it was closed at once")
        except OSError as error:  # TimeoutError is one
            if not isinstance(error, ConnectionError):  # a refused connection fails fast
                self._unreachable_until = time.monotonic() + UNREACHABLE_SECONDS
            raise UnreachableError(f"{self._host}:{self._port}: {error}") from error

    def _check(self, result: Callable[[], object], *, is_late: bool = False) -> None:
        """Call `result`; a lost connection is a PeerLostError."""
        try:
            result()
        except (OSError, UnreachableError) as error:
            if is_late:
                raise PeerLostError(f"{self._address}: no end of a transfer in time") from None
            if isinstance(error, UnreachableError):
                raise
            raise PeerLostError(f"{self._address}: the data connection: {error}") from error


def _may_be_short(call: FetchCall, reader: FrameReader) -> bool:
    """Whether an answer may be short, with payloads that the loop itself can copy."""
    return (
        call.transport.startswith(SHARED_MEMORY)  # the only transport that never blocks
        and not reader.assembler.reports_progress
        and reader.assembler.total_bytes <= MAX_AT_ONCE_BYTES
    )


async def _is_readable_soon(connection: DataConnection) -> bool:
    """Whether a whole short answer arrives within `AT_ONCE_SECONDS`."""
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()
    late = loop.call_later(AT_ONCE_SECONDS, answered.set)
    loop.add_reader(connection, answered.set)
    try:
        await answered.wait()
    finally:
        loop.remove_reader(connection)
        late.cancel()
    return is_readable(connection)


def _receive_all(
    connection: DataConnection, reader: FrameReader, peer: str, channel: ReceiveChannel | None
) -> None:
    """Receive an answer until its commit, on a thread; units go to the channel, if given."""
    try:
        try:
            wait_for_answer(connection, peer=peer)
        except OSError as error:
            raise UnreachableError(f"{peer}: the data connection: {error}") from error
        while (units := receive_units(connection, reader, peer)) is not None:
            if channel is not None:
                channel.put(units)
    finally:
        if channel is not None:
            channel.end()


def _is_open(connection: DataConnection) -> bool:
    """Whether an idle connection is still open and has no unread bytes."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
