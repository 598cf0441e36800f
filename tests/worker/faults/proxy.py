"""A TCP proxy before a pod: resets its connections, or goes silent as a cable that is cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


class Proxy:
    """Two doors that stay, whatever becomes of the pod behind them: to gRPC, and to its data."""

    def __init__(self) -> None:
        self.grpc = Door()
        self.data = Door()
        self._doors = (self.grpc, self.data)

    @property
    def address(self) -> str:
        """Of the pod, for everybody else."""
        return f"127.0.0.1:{self.grpc.port}"

    @property
    def connections(self) -> frozenset[object]:
        """Those to the pod behind it, each told from all others."""
        return self.grpc.connections | self.data.connections

    @property
    def num_resets(self) -> int:
        """Connections that were reset so far."""
        return sum(door.num_resets for door in self._doors)

    @property
    def num_swallowed(self) -> int:
        """Bytes that were lost so far."""
        return sum(door.num_swallowed for door in self._doors)

    def reset(self) -> None:
        """RST to both ends of every connection."""
        for door in self._doors:
            door.reset()

    def silence(self) -> None:
        """From now on nothing passes, and nobody is told: what is sent is lost."""
        for door in self._doors:
            door.silent = True

    def mend(self) -> None:
        """From now on everything passes."""
        for door in self._doors:
            door.silent = False


class Door:
    """One port of a proxy. `target_port` is the pod's, set when it listens.

    `num_passed` counts the bytes that came through, either way.
    """

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self.port = 0
        self.target_port = 0
        self.silent = False
        self.num_resets = 0
        self.num_swallowed = 0
        self.num_passed = 0

    async def open(self) -> None:
        """Listen on a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def connections(self) -> frozenset[object]:
        """As the proxy's."""
        return frozenset(end for end in self._ends if end.reaches_pod)

    def reset(self) -> None:
        """As the proxy's."""
        self.num_resets += len(self.connections)
        for end in list(self._ends):
            end.reset()

    def close(self) -> None:
        """Refuse and cut everything."""
        if self._server is not None:
            self._server.close()
        self.reset()


class _End(asyncio.Protocol):
    """One end of a connection; what it gets goes to the other."""

    def __init__(self, door: Door, *, other: _End | None = None) -> None:
        self._door = door
        self._other = other
        self.reaches_pod = other is not None
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._door._ends.add(self)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._other is None:
            self._connecting = asyncio.create_task(self._connect())
        else:
            self._other._other = self
            for data in self._other._early:
                transport.write(data)

    async def _connect(self) -> None:
        """Reach the pod; where nobody listens, neither do we."""
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: _End(self._door, other=self), "127.0.0.1", self._door.target_port
            )
        except OSError:
            self.reset()

    def data_received(self, data: bytes) -> None:
        if self._door.silent:
            self._door.num_swallowed += len(data)
            return
        self._door.num_passed += len(data)
        if self._other is None or self._other._transport is None:
            self._early.append(data)
        else:
            self._other._transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door._ends.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        # a cut cable carries no FIN either
        if self._other is not None and self._other._transport and not self._door.silent:
            self._other._transport.close()

    def reset(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()


@contextlib.asynccontextmanager
async def proxy() -> AsyncIterator[Proxy]:
    """A proxy on free ports; set each door's `target_port` when the pod listens."""
    found = Proxy()
    try:
        await found.grpc.open()
        await found.data.open()
        yield found
    finally:
        found.grpc.close()
        found.data.close()
