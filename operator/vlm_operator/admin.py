"""The operator's HTTP server: /metrics, /healthz and /readyz."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from vlm_operator import metrics

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def admin(
    bind: str, port: int, *, problem: Callable[[], str], leading: Callable[[], bool]
) -> AsyncIterator[None]:
    """Serve until the context exits.

    `problem` returns why the process should be restarted; "" if it is healthy. Port 0 selects a
    free one and logs it.

    Raises:
        OSError: the process cannot listen on the address.
    """

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    async def healthz(_: web.Request) -> web.Response:
        if error := problem():
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="leading\n" if leading() else "standing by\n")

    server = web.Application()
    server.router.add_get("/metrics", exposition)
    server.router.add_get("/healthz", healthz)
    server.router.add_get("/readyz", readyz)
    runner = web.AppRunner(server, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(bind, port)).start()
        logger.info("metrics", extra={"bind": bind, "port": runner.addresses[0][1]})
        yield
    finally:
        await runner.cleanup()


def listen(address: str, port: int) -> socket.socket:
    """Open a listening socket as the workers do (`vlm_worker/wire/sockets.py`).

    `::` accepts IPv4 and IPv6. If the kernel has no IPv6, `0.0.0.0` replaces it.

    Raises:
        OSError: the process cannot listen; the message names address and port.
    """
    dual = address == "::" and socket.has_dualstack_ipv6()
    host = "0.0.0.0" if address == "::" and not dual else address  # noqa: S104 - as "::" is
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        fix = "choose another --bind or --metrics-port"
        raise OSError(f"cannot listen on {host} port {port}: {reason}; {fix}") from None
