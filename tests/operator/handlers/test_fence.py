"""kopf writes, as we do, only while the lease leaves time for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import kopf
import pytest
from aiohttp import web

from vlm_operator import framework
from vlm_operator.errors import LeaseLostError
from vlm_operator.framework import fence, login
from vlm_operator.handlers import App
from vlm_operator.kube import Connection
from vlm_operator.sight import Sight


class Lease:
    """What is asked before each write."""

    lost = False

    def check(self) -> None:
        if self.lost:
            raise LeaseLostError("gone")


class Server:
    """An API server that notes what reaches it, and may take its time."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.url = ""
        self.slow = False

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.method)
        if self.slow:
            await asyncio.sleep(60)
        return web.Response(text=request.headers.get("Authorization", ""))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_route("*", "/", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield found
    await runner.cleanup()


async def test_a_write_without_the_lease_is_a_broken_connection_and_never_sent(server: Server):
    lease = Lease()
    async with aiohttp.ClientSession(middlewares=(fence(lease.check),)) as session:
        await session.patch(server.url)
        lease.lost = True
        for method in ("PATCH", "POST", "PUT", "DELETE"):
            # kopf tries again what failed like this
            with pytest.raises(aiohttp.ClientConnectionError, match="gone"):
                await session.request(method, server.url)
        await session.get(server.url)
        lease.lost = False
        await session.patch(server.url)
    assert server.seen == ["PATCH", "GET", "PATCH"]


async def test_a_write_ends_within_the_time_that_the_lease_leaves(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(framework, "REQUEST_TIMEOUT_SECONDS", 0.05)
    server.slow = True
    async with aiohttp.ClientSession(middlewares=(fence(lambda: None),)) as session:
        with pytest.raises(TimeoutError):
            await session.patch(server.url, timeout=aiohttp.ClientTimeout(total=30))
    assert server.seen == ["PATCH"]


async def test_kopf_is_given_our_credentials_behind_the_fence(server: Server):
    lease = Lease()

    async def connect() -> Connection:
        return Connection(server.url, None, False, "secret", None, None)

    memo = kopf.Memo()
    memo.app = App(
        make_reconciler=lambda *_: None,
        connect=connect,
        clock=lambda: 0.0,
        sight=Sight(lambda: 0.0),
        check=lease.check,
    )
    found = await login(memo=memo)
    async with found.aiohttp_session as session:
        answer = await session.get(server.url)
        assert await answer.text() == "Bearer secret"
        lease.lost = True
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.patch(server.url)
