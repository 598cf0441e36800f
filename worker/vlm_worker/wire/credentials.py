"""Who may talk: the one seam where channels and ports are made secure.

Plaintext until mutual TLS is built here; `WARNING` is logged by every process that opens a port, so
that nobody takes the digest of a frame for authenticity.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final

import grpc

from vlm_worker.settings.timers import Timers
from vlm_worker.wire.listening import bindable, listen
from vlm_worker.wire.options import channel_options

WARNING = (
    "gRPC and data between pods are plaintext and unauthenticated: keep them inside a NetworkPolicy"
)
_BACKLOG: Final = 64
_TIMEVAL: Final = struct.Struct("@ll")
_TCP_OPTIONS: Final = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 10),  # seconds, and those between probes
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 2),
)


def open_channel(address: str, timers: Timers) -> Any:
    """A `grpc.aio.Channel` to a worker."""
    return grpc.aio.insecure_channel(address, options=channel_options(timers))


def add_port(server: Any, address: str, port: int) -> int:
    """Let a `grpc.aio.Server` listen; returns the port.

    gRPC makes its own socket: it cannot be given one.

    Raises:
        OSError: the address cannot be bound.
    """
    host = bindable(address)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound: int = server.add_insecure_port(target)
    except RuntimeError as error:
        raise OSError(f"--grpc-port={port}: cannot listen on {target}: {error}") from error
    if bound == 0:
        raise OSError(f"--grpc-port={port}: cannot listen on {target}")
    return bound


def open_data_port(address: str, port: int) -> socket.socket:
    """A socket that listens for data connections, and does not block.

    Raises:
        OSError: the address cannot be bound.
    """
    try:
        listener = listen(address, port, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"--data-port={port}: {error}") from error
    listener.setblocking(False)
    return listener


async def open_data_connection(host: str, port: int, timers: Timers) -> socket.socket:
    """A data connection to a worker. It blocks.

    Raises:
        OSError: nobody is there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
        return data_connection(connection, receive_seconds=timers.no_progress)
    except BaseException:
        connection.close()
        raise


def data_connection(
    connection: socket.socket, *, receive_seconds: float = 0, send_seconds: float = 0
) -> socket.socket:
    """The socket as data connections are: it blocks, so long without a byte; 0 is for ever.

    Buffers are left to the kernel, which makes them larger than it lets us ask for. Between two
    fetches nothing is sent, and only probes tell a peer whose node is gone from one that idles.
    """
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in _TCP_OPTIONS:
        connection.setsockopt(socket.IPPROTO_TCP, option, number)
    for option, seconds in (
        (socket.SO_RCVTIMEO, receive_seconds),
        (socket.SO_SNDTIMEO, send_seconds),
    ):
        whole, part = divmod(round(seconds * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, part))
    return connection
