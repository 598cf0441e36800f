"""A TCP proxy before a pod: resets its connections, or goes silent as a cable that is cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


class Proxy:
    """`address` stays, whatever becomes of the pod behind it."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self._ends: set[_End] = set()
        self.target_port = 0
        self.silent = False
        self.num_resets = 0
        self.num_swallowed = 0
        port = server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    @property
    def connections(self) -> frozenset[object]:
        """Those to the pod behind it, each told from all others."""
        return frozenset(end for end in self._ends if end.reaches_pod)

    def reset(self) -> None:
        """RST to both ends of every connection."""
        self.num_resets += len(self.connections)
        for end in list(self._ends):
            end.reset()

    def silence(self) -> None:
        """From now on nothing passes, and nobody is told: what is sent is lost."""
        self.silent = True

    def close(self) -> None:
        """Refuse and cut everything."""
        self._server.close()
        self.reset()


class _End(asyncio.Protocol):
    """One end of a connection; what it gets goes to the other."""

    def __init__(self, proxy: Proxy, *, other: _End | None = None) -> None:
        self._proxy = proxy
        self._other = other
        self.reaches_pod = other is not None
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._proxy._ends.add(self)
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
                lambda: _End(self._proxy, other=self), "127.0.0.1", self._proxy.target_port
            )
        except OSError:
            self.reset()

    def data_received(self, data: bytes) -> None:
        if self._proxy.silent:
            self._proxy.num_swallowed += len(data)
        elif self._other is None or self._other._transport is None:
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
        self._proxy._ends.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        # a cut cable carries no FIN either
        if self._other is not None and self._other._transport and not self._proxy.silent:
            self._other._transport.close()

    def reset(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()


@contextlib.asynccontextmanager
async def proxy() -> AsyncIterator[Proxy]:
    """A proxy on a free port; set `target_port` when the pod listens."""
    found: list[Proxy] = []
    server = await asyncio.get_running_loop().create_server(lambda: _End(found[0]), "127.0.0.1", 0)
    found.append(Proxy(server))
    try:
        yield found[0]
    finally:
        found[0].close()
