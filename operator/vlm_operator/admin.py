"""The operator's HTTP server: /metrics, /healthz and /readyz."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from vlm_operator import metrics
from vlm_operator.listening import listen

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def admin(
    bind: str, port: int, *, problem: Callable[[], str], leading: Callable[[], bool]
) -> AsyncIterator[None]:
    """Serve until the context exits.

    Args:
        bind: address to listen on.
        port: TCP port; 0 selects a free one and logs it.
        problem: returns why the process should be restarted; "" if it is healthy.
        leading: returns whether the process holds the lease.

    Raises:
        OSError: the process cannot listen on the address.
    """

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    async def healthz(_: web.Request) -> web.Response:
        found = problem()
        if found:
            return web.Response(status=503, text=f"{found}\n")
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
