"""With `::`, and with an address, each kind of server answers where the flag says."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import grpc
import pytest

from vlm_worker.server.data_port import DataPort
from vlm_worker.server.worker_server import HttpServer
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.wire.sockets import ALL_IPV4, add_port, listen

Server = Callable[[str], AbstractAsyncContextManager[int]]


@contextlib.asynccontextmanager
async def http(address: str) -> AsyncIterator[int]:
    server = HttpServer(
        stats=dict, exposition=lambda: b"", healthy=lambda: None, ready=lambda: None
    )
    try:
        yield await server.start(address, 0)
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def rpc(address: str) -> AsyncIterator[int]:
    server = grpc.aio.server()
    port = add_port(server, address, 0)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=None)


@contextlib.asynccontextmanager
async def data(address: str) -> AsyncIterator[int]:
    server = DataPort(lambda *_: pytest.fail("nothing is fetched"), PRODUCTION)
    try:
        yield server.open(address, 0)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def gateway(address: str) -> AsyncIterator[int]:
    with contextlib.closing(listen(address, 0)) as sock:
        yield sock.getsockname()[1]


def reached(port: int) -> set[str]:
    """The loopback addresses at which somebody listens."""
    found = set()
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=30):
            found.add(host)
    return found


@pytest.mark.parametrize("server", [http, rpc, data, gateway])
@pytest.mark.parametrize(
    ("bind", "addresses"),
    [
        ("::", {"127.0.0.1", "::1"}),
        ("::1", {"::1"}),
        (ALL_IPV4, {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
    ],
)
async def test_a_port_answers_where_bind_says(
    server: Server, bind: str, addresses: set[str]
) -> None:
    if server is rpc and bind == ALL_IPV4:
        addresses = {"127.0.0.1", "::1"}  # gRPC itself takes either wildcard for both
    try:
        listen("::1", 0).close()
    except OSError as error:
        if addresses == {"::1"}:
            pytest.skip(f"this machine has no IPv6: {error}")
        addresses = addresses - {"::1"}
    found: set[str] = set()
    for _ in range(3):  # another process may have the same port at the address that we left free
        async with server(bind) as port:
            found = reached(port)
        if found == addresses:
            return
    assert found == addresses


@pytest.mark.parametrize("server", [http, rpc, data, gateway])
async def test_an_address_in_use_is_refused_by_name(server: Server) -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1"):
        async with server("192.0.2.1"):
            pytest.fail("it listens")
