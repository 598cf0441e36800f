"""The consumer's side of data connections: fetches to one worker, each on a thread of its own.

    port, from the metadata of a fetch over gRPC ─▶ is_usable ─▶ units(...): checked in the thread
    nobody there ─▶ UnreachableError ─▶ not usable for a while; the fetch goes over gRPC

A connection is used again after a fetch that came to its end; any other is closed, which is how the
producer learns that nobody reads any more. A few rows in shared memory are copied on the loop, when
all that is said of them has come: waking a thread, and being woken by it, costs as much.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Final, TypeVar

from vlm_worker.errors import PeerLostError
from vlm_worker.settings.timers import Timers
from vlm_worker.transfer.come import MAX_UNTAKEN, Come
from vlm_worker.transfer.running import Running, started
from vlm_worker.transfer.shared_memory import NAME as SHARED_MEMORY
from vlm_worker.wire.calls import FetchCall
from vlm_worker.wire.credentials import open_data_connection
from vlm_worker.wire.data import Fetch, has_come, receive_units, request_to, shut, wait_for_answer
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Units

MAX_FETCHES: Final = 64
"""Over data connections at a time, to all workers: each holds a thread. Others go over gRPC."""
MAX_IDLE: Final = 4
MAX_AT_ONCE_BYTES: Final = 8 << 20
"""Of units in shared memory: copied on the loop, in less time than two threads take to be woken."""
AT_ONCE_SECONDS: Final = 0.005
"""For a thread to be waiting that hears of a lost producer."""
UNREACHABLE_SECONDS: Final = 60.0
"""A port that could not be reached, behind a firewall maybe, is not tried again for so long."""

T = TypeVar("T")


class UnreachableError(Exception):
    """No data connection came to be; nothing was read."""


class Threads:
    """The threads of all data links of a worker: one for each fetch that is under way."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="data-fetch")
        self.num_busy = 0

    def start(self, work: Callable[..., T], *args: Any) -> Running[T]:
        """Do it on a thread."""
        return started(self._pool, work, *args)

    def close(self) -> None:
        """End them; what they do ends when its connection is closed."""
        self._pool.shutdown(wait=False)


class DataLink:
    """Data connections to one worker; on one event loop. `learn` where it listens first."""

    def __init__(self, address: str, threads: Threads, timers: Timers) -> None:
        self._port: int | None = None
        self._address = address
        self._host = address.rpartition(":")[0].strip("[]")
        self._threads = threads
        self._timers = timers
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._unreachable_until = 0.0
        self._closed = False

    @property
    def is_usable(self) -> bool:
        """Whether a fetch may go this way."""
        return (
            self._port is not None
            and not self._closed
            and self._threads.num_busy < MAX_FETCHES
            and time.monotonic() >= self._unreachable_until
        )

    def learn(self, port: int | None) -> None:
        """Where the worker listens; None where it does not."""
        if port != self._port:
            self._port, self._unreachable_until = port, 0.0

    async def units(
        self, fetch: Fetch, call: FetchCall, reader: FrameReader
    ) -> AsyncGenerator[Units]:
        """Whole units as they come; the reader's `commit` is there when they have ended well.

        Raises:
            UnreachableError: nobody took the call.
            WorkerError: what the producer raised, or the reader.
        """
        self._threads.num_busy += 1  # before others ask whether there is a thread for them
        try:
            connection = await self._asked(request_to(fetch, call))
        except BaseException:
            self._threads.num_busy -= 1
            raise
        self._busy.add(connection)
        has_ended = False
        try:
            if _may_be_short(call, reader) and await _has_come(connection):
                self._check(lambda: receive_units(connection, reader, self._address))
            else:
                async with aclosing(self._by_thread(connection, reader)) as all_units:
                    async for units in all_units:
                        yield units
            has_ended = True
        finally:
            self._leave(connection, reader, has_ended=has_ended)

    def close(self) -> None:
        """Close all connections; what is being read ends as if the worker were lost."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        for connection in self._busy:
            shut(connection)

    async def _by_thread(
        self, connection: socket.socket, reader: FrameReader
    ) -> AsyncGenerator[Units]:
        """What a thread receives; it has ended when this has."""
        come = (
            Come(most=None if reader.is_in_place else MAX_UNTAKEN) if reader.is_followed else None
        )
        running = self._threads.start(_receive_all, connection, reader, self._address, come)
        has_ended = is_late = False

        def expire() -> None:
            nonlocal is_late
            is_late = True
            shut(connection)  # a thread that reads hears of it

        deadline = asyncio.get_running_loop().call_later(self._timers.fetch, expire)
        try:
            if come is not None:
                async with aclosing(come.units()) as all_units:
                    async for units in all_units:
                        yield units
            await running.wait()
            self._check(running.result, is_late=is_late)
            has_ended = True
        finally:
            deadline.cancel()
            if not has_ended:
                shut(connection)
            if come is not None:
                come.give_up()
            await running.end()  # before the connection is left, whatever becomes of us

    async def _asked(self, request: bytes) -> socket.socket:
        """A connection that has taken a request: one that is idle and lives, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if _lives(connection) and _takes(connection, request):
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._timers.connect):
                connection = await open_data_connection(self._host, self._port or 0, self._timers)
            if _takes(connection, request):
                return connection
            connection.close()
            raise ConnectionResetError("it was closed at once")
        except OSError as error:  # TimeoutError is one
            if not isinstance(error, ConnectionError):  # which costs nothing to hear
                self._unreachable_until = time.monotonic() + UNREACHABLE_SECONDS
            raise UnreachableError(f"{self._host}:{self._port}: {error}") from error

    def _check(self, result: Callable[[], object], *, is_late: bool = False) -> None:
        try:
            result()
        except (OSError, UnreachableError) as error:
            if is_late:
                raise PeerLostError(f"{self._address}: no end of a transfer in time") from None
            if isinstance(error, UnreachableError):
                raise
            raise PeerLostError(f"{self._address}: the data connection: {error}") from error

    def _leave(self, connection: socket.socket, reader: FrameReader, *, has_ended: bool) -> None:
        reader.close()
        self._busy.discard(connection)
        self._threads.num_busy -= 1
        if has_ended and not self._closed and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()


def _may_be_short(call: FetchCall, reader: FrameReader) -> bool:
    """Whether an answer may be heads alone, of units that the loop itself can copy."""
    return (
        call.transport.startswith(SHARED_MEMORY)  # of all transports, this one alone never waits
        and not reader.is_followed
        and reader.total_bytes <= MAX_AT_ONCE_BYTES
    )


async def _has_come(connection: socket.socket) -> bool:
    """Whether all of a short answer is there at once."""
    loop = asyncio.get_running_loop()
    answered = loop.create_future()

    def answer() -> None:
        if not answered.done():
            answered.set_result(None)

    late = loop.call_later(AT_ONCE_SECONDS, answer)
    loop.add_reader(connection, answer)
    try:
        await answered
    finally:
        loop.remove_reader(connection)
        late.cancel()
    return has_come(connection)


def _takes(connection: socket.socket, request: bytes) -> bool:
    """Send a request, for which an idle connection always has room: the answer comes sooner so."""
    try:
        return connection.send(request, socket.MSG_DONTWAIT) == len(request)
    except OSError:
        return False


def _receive_all(
    connection: socket.socket, reader: FrameReader, peer: str, come: Come | None
) -> None:
    """The answer to a request, to its commit; on a thread. Units go to who follows them."""
    try:
        try:
            wait_for_answer(connection, peer=peer)
        except OSError as error:
            raise UnreachableError(f"{peer}: the data connection: {error}") from error
        while (units := receive_units(connection, reader, peer)) is not None:
            if come is not None:
                come.put(units)
    finally:
        if come is not None:
            come.end()


def _lives(connection: socket.socket) -> bool:
    """Whether an idle connection is still open: nothing may have come over it."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
