"""A hub on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from worker.serve.hub import Hub


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    hub = Hub()
    runner = web.AppRunner(hub.app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield hub
    hub.resume.set()  # else the end waits a minute for a file that nobody reads any more
    await runner.cleanup()
