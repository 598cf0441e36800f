"""The HTTP side of a worker: /stats, /metrics, /healthz, /readyz; up before the model is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from vlm_worker.server.meters import CONTENT_TYPE
from vlm_worker.wire.listening import listen


class HttpServer:
    """Four pages, each made by a function when it is asked for.

    Args:
        stats: the document of `/stats`.
        exposition: Prometheus' text.
        healthy: None, or why this process should be restarted.
        ready: None, or why it should get no traffic.
    """

    def __init__(
        self,
        *,
        stats: Callable[[], dict[str, Any]],
        exposition: Callable[[], bytes],
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
    ) -> None:
        self._stats = stats
        self._exposition = exposition
        app = web.Application()
        app.router.add_get("/stats", self._get_stats)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", _verdict(healthy))
        app.router.add_get("/readyz", _verdict(ready))
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError where that cannot be."""
        await self._runner.setup()
        site = web.SockSite(self._runner, listen(host, port))
        await site.start()
        address: tuple[Any, ...] = self._runner.addresses[0]
        return int(address[1])

    async def stop(self) -> None:
        """Close the port and what is open on it."""
        await self._runner.cleanup()

    async def _get_stats(self, _: web.Request) -> web.Response:
        return web.json_response(self._stats(), dumps=json.dumps)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposition(), headers={"Content-Type": CONTENT_TYPE})


def _verdict(ask: Callable[[], str | None]) -> Any:
    async def handler(_: web.Request) -> web.Response:
        reason = ask()
        return web.Response(text=reason or "ok", status=200 if reason is None else 503)

    return handler
