"""What the operator answers over HTTP: /metrics, /healthz and /readyz."""

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
    """Serve until left.

    Args:
        bind: the address to listen on.
        port: 0 picks a free one, which the log tells.
        problem: why this process should be restarted; "" where all is well.
        leading: whether it holds the lease.

    Raises:
        OSError: the address cannot be listened on.
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
