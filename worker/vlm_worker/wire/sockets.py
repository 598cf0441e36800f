"""Opens channels and ports; the only module for transport security.

--bind=::       IPv4 and IPv6 through one socket; IPv4 alone if the kernel has no IPv6
other values    that address and no other

With `--identity-dir`, gRPC and data connections use mutual TLS. Without it, all connections are
plaintext, and a process that opens a port logs a `WARNING`: the digest of a frame does not
authenticate.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any, Final

import grpc

from vlm_worker.settings.timers import Timers
from vlm_worker.wire.identity import Certificate, IdentityError, ServiceIdentity
from vlm_worker.wire.identity_store import Credentials, IdentityStore
from vlm_worker.wire.rpc import channel_options
from vlm_worker.wire.secure_connection import DataConnection, secure

WARNING = (
    "gRPC and data between pods are plaintext and unauthenticated: keep them inside a NetworkPolicy"
)
ALL_IPV4: Final = "0.0.0.0"  # noqa: S104 - the same as "::", for hosts without IPv6
_HTTP_BACKLOG: Final = 1024
_BACKLOG: Final = 64
_TIMEVAL: Final = struct.Struct("@ll")
_TCP_OPTIONS: Final = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 10),  # seconds, also between probes
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 2),
)


def open_channel(address: str, timers: Timers) -> Any:
    return grpc.aio.insecure_channel(address, options=channel_options(timers))


def open_secure_channel(
    address: str, timers: Timers, credentials: Credentials, peer: ServiceIdentity
) -> Any:
    """A channel that connects only to a process with the identity `peer`."""
    options = [*channel_options(timers), ("grpc.ssl_target_name_override", peer.dns_name)]
    return grpc.aio.secure_channel(address, credentials.channel, options=options)


async def identity_at(address: str, credentials: Credentials) -> ServiceIdentity:
    """The identity of the worker at an address, from a handshake.

    The caller does not know its role: a worker of any role may have loaded the stage.

    Raises:
        OSError: no connection, or its certificate is of another trust anchor or has expired.
        IdentityError: it is of another service.
    """
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=credentials.client)
    try:
        found = writer.get_extra_info("ssl_object").getpeercert()
    finally:
        writer.transport.abort()
    peer = Certificate.of_peer(found).identity
    if not peer.is_same_service(credentials.identity):
        raise IdentityError(f"{peer.uri} is no peer of {credentials.identity.uri}")
    return peer


def peer_of(context: Any) -> ServiceIdentity:
    """The identity of the caller of a gRPC method. Raises IdentityError."""
    uris = context.auth_context().get("peer_spiffe_id", ())
    if len(uris) != 1:
        raise IdentityError("the caller has no identity of a service in its certificate")
    return ServiceIdentity.of_uri(uris[0].decode(errors="replace"))


def add_port(server: Any, address: str, port: int, *, identity: IdentityStore | None = None) -> int:
    """Add a listening port to a `grpc.aio.Server`; returns the port. Raises OSError.

    With `identity`, each handshake needs a certificate of the client, and uses the newest files.
    """
    host = bindable(address)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if identity is None:
            bound: int = server.add_insecure_port(target)
        else:
            bound = server.add_secure_port(target, _server_credentials(identity))
    except RuntimeError as error:
        raise OSError(f"--grpc-port={port}: cannot listen on {target}: {error}") from error
    if bound == 0:
        raise OSError(f"--grpc-port={port}: cannot listen on {target}")
    return bound


def _server_credentials(identity: IdentityStore) -> grpc.ServerCredentials:
    return grpc.dynamic_ssl_server_credentials(
        identity.now.server_configuration,
        lambda: identity.now.server_configuration,  # on a thread of gRPC, for each handshake
        require_client_authentication=True,
    )


def open_data_port(address: str, port: int) -> socket.socket:
    """A non-blocking socket that listens for data connections. Raises OSError."""
    try:
        listener = listen(address, port, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"--data-port={port}: {error}") from error
    listener.setblocking(False)
    return listener


async def open_data_connection(
    host: str,
    port: int,
    timers: Timers,
    secured: tuple[Credentials, ServiceIdentity] | None = None,
) -> DataConnection:
    """A blocking data connection to a worker.

    `secured` is the pair for mutual TLS and the only identity that the worker may have; None is
    plaintext.

    Raises:
        OSError: it cannot be reached in time, or its certificate is another one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    raw = socket.socket(family, socket.SOCK_STREAM)
    connection: DataConnection = raw
    try:
        raw.setblocking(False)
        async with asyncio.timeout(timers.connect):
            await asyncio.get_running_loop().sock_connect(raw, (host, port))
        if secured is not None:
            credentials, expected = secured
            async with asyncio.timeout(timers.hello):
                connection = await secure(raw, credentials, server_side=False)
            if connection.peer != expected:
                raise PermissionError(f"it is {connection.peer.uri}, not {expected.uri}")
        data_connection(raw, receive_seconds=timers.no_progress)
    except BaseException:
        raw.close()
        raise
    return connection


async def accept_data_connection(
    raw: socket.socket, timers: Timers, identity: IdentityStore | None, *, send_seconds: float
) -> DataConnection:
    """Configure an accepted socket, after the handshake if there is an `identity`.

    Raises:
        OSError: the handshake failed, or it was not complete in time.
    """
    connection: DataConnection = raw
    if identity is not None:
        try:
            async with asyncio.timeout(timers.hello):
                connection = await secure(raw, identity.now, server_side=True)
        except TimeoutError:
            raise PermissionError(f"no handshake within {timers.hello:g} s") from None
    data_connection(raw, send_seconds=send_seconds)
    return connection


def data_connection(
    connection: socket.socket, *, receive_seconds: float = 0, send_seconds: float = 0
) -> socket.socket:
    """Configure a socket as a data connection: blocking, with timeouts in seconds; 0 is none.

    The kernel sizes the buffers: it allows itself more than a process may ask for. Between two
    fetches nothing is sent; only keepalive probes detect a peer whose node is gone.
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


def bindable(address: str) -> str:
    """The address to bind for `--bind`: itself, but `0.0.0.0` for `::` if there is no IPv6."""
    return ALL_IPV4 if address == "::" and not socket.has_dualstack_ipv6() else address


def listen(address: str, port: int, *, backlog: int = _HTTP_BACKLOG) -> socket.socket:
    """A listening socket at `bindable(address)`. Raises OSError with address and port."""
    host = bindable(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server(
            (host, port), family=family, dualstack_ipv6=host == "::", backlog=backlog
        )
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            f"cannot listen on {host} port {port}: {why}; choose another address or port"
        ) from None
    # asyncio sets it only for its own sockets; without it, each token would wait 40 ms for an ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
