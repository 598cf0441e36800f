"""The local port forwards to a ready pod while there is one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from vlm_cli.access import Access
from vlm_cli.forward import Candidates, forward_to_ready
from vlm_cli.output import CliError
from vlm_local.waiting import until
from vlm_operator.kube import Connection


class Pods:
    """Gateway pods that a test makes ready and deletes; each answers with its name."""

    def __init__(self) -> None:
        self.found: Candidates | None = None
        self.reports: list[str] = []
        self.channels: dict[str, list[web.WebSocketResponse]] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._server: TestServer | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/ns/pods/{pod}/portforward", self._connect)
        self._server = TestServer(app)
        await self._server.start_server()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.close()

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        channel = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await channel.prepare(request)
        name = request.match_info["pod"]
        self.channels.setdefault(name, []).append(channel)
        port = int(request.query["ports"]).to_bytes(2, "little")
        for number in (0, 1):
            await channel.send_bytes(bytes([number]) + port)
        await channel.send_bytes(b"\0" + name.encode())
        async for message in channel:
            if message.type is WSMsgType.BINARY:
                await channel.close()
        return channel

    def show(self, *ready: str, present: tuple[str, ...] = ()) -> None:
        self.found = Candidates(frozenset((*ready, *present)), ready)

    async def find(self) -> Candidates | None:
        return self.found

    def forward(self) -> contextlib.AbstractAsyncContextManager[str]:
        assert self._server is not None
        url = str(self._server.make_url("")).rstrip("/")
        connection = Connection(url, None, False, None, None, None)
        access = Access(cluster=None, namespace="ns", connection=connection)  # type: ignore[arg-type]
        return forward_to_ready(
            access, find=self.find, port=8000, local_port=self.port, report=self.reports.append
        )

    async def ask(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            return (await reader.read(100)).decode()
        finally:
            writer.close()

    async def until_led_to(self, name: str) -> None:
        async def led() -> bool:
            return await self.ask() == name

        await until(led, seconds=60, awaited=f"the port to lead to {name}")


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    served = Pods()
    await served.start()
    yield served
    await served.stop()


async def test_the_port_leads_to_another_pod_when_its_own_is_gone(pods: Pods):
    pods.show("a")
    async with pods.forward():
        assert await pods.ask() == "a"
        pods.show("b")
        await pods.until_led_to("b")
    assert pods.reports == [f"port {pods.port} now leads to gateway pod b"]


async def test_a_connection_that_breaks_leaves_the_port_open_for_the_next(pods: Pods):
    pods.show("a")
    async with pods.forward():
        reader, writer = await asyncio.open_connection("127.0.0.1", pods.port)
        assert await reader.read(100) == b"a"
        await pods.channels["a"][-1].close()
        assert await reader.read(100) == b""
        writer.close()
        assert await pods.ask() == "a"


async def test_a_connection_stays_with_a_pod_that_drains(pods: Pods):
    pods.show("a")
    async with pods.forward():
        reader, writer = await asyncio.open_connection("127.0.0.1", pods.port)
        assert await reader.read(100) == b"a"
        pods.show("b", present=("a",))
        await pods.until_led_to("b")
        assert not reader.at_eof()
        writer.write(b"x")  # the pod then closes the connection
        assert await reader.read(100) == b""
        writer.close()


async def test_a_connection_ends_when_its_pod_is_gone(pods: Pods):
    pods.show("a")
    async with pods.forward():
        reader, writer = await asyncio.open_connection("127.0.0.1", pods.port)
        assert await reader.read(100) == b"a"
        pods.show("b")
        assert await reader.read(100) == b""
        writer.close()


async def test_a_time_without_a_ready_pod_is_reported_and_ends(pods: Pods):
    pods.show("a")
    async with pods.forward():
        pods.show()

        async def reported() -> bool:
            return bool(pods.reports)

        await until(reported, seconds=60, awaited="the loss to be reported")
        assert pods.reports == [f"no gateway pod is ready: port {pods.port} waits for one"]
        assert await pods.ask() == ""
        pods.found = None  # an API server that does not answer changes nothing
        pods.show("b")
        await pods.until_led_to("b")


async def test_no_ready_pod_at_the_start_is_an_error(pods: Pods):
    pods.show(present=("a",))
    with pytest.raises(CliError, match="No gateway pod is ready"):
        async with pods.forward():
            pytest.fail("it leads nowhere")
