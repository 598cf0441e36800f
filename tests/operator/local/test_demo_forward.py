"""The demo's port follows the gateway: it leads to a ready pod for as long as there is one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from vlm_operator.local.demo.forward import Gateways, forward
from vlm_operator.local.errors import LocalError
from vlm_operator.local.waiting import until

# As kubectl does: it listens on a port that it chooses, says so, and leads to the pod that it was
# given, which here answers with its name. Each one notes its pid.
KUBECTL = """#!{python}
import os, pathlib, socket, sys
name = sys.argv[-2].removeprefix("pod/")
pathlib.Path({folder!r}, name + ".pid").write_text(str(os.getpid()))
with socket.create_server(("127.0.0.1", 0)) as server:
    print(f"Forwarding from 127.0.0.1:{{server.getsockname()[1]}} -> 8000", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(name.encode())
        if os.fork() == 0:
            connection.recv(1)
            os._exit(0)
        connection.close()
"""


class Cluster:
    """Gateway pods that a test makes ready and takes away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubectl = folder / "kubectl"
        self.kubectl.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
        self.kubectl.chmod(0o755)
        self.found: Gateways | None = None
        self.said: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def show(self, *ready: str, present: tuple[str, ...] = ()) -> None:
        self.found = Gateways(frozenset((*ready, *present)), ready)

    async def find(self) -> Gateways | None:
        return self.found

    def forward(self) -> contextlib.AbstractAsyncContextManager[str]:
        return forward(
            self.kubectl, Path("config"), find=self.find, port=self.port, say=self.said.append
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
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def test_the_port_leads_to_another_pod_when_its_own_is_gone(cluster: Cluster):
    cluster.show("ns/a")
    async with cluster.forward():
        assert await cluster.ask() == "a"
        cluster.show("ns/b")
        await cluster.until_led_to("b")
    assert cluster.said == [f"port {cluster.port} now leads to gateway pod ns/b"]


async def test_a_kubectl_that_ends_is_started_again(cluster: Cluster):
    cluster.show("ns/a")
    async with cluster.forward():
        os.kill(int((cluster.folder / "a.pid").read_text()), signal.SIGKILL)
        await cluster.until_led_to("a")


async def test_a_connection_stays_with_a_pod_that_drains(cluster: Cluster):
    cluster.show("ns/a")
    async with cluster.forward():
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        assert await reader.read(100) == b"a"
        cluster.show("ns/b", present=("ns/a",))
        await cluster.until_led_to("b")
        assert not reader.at_eof()
        writer.write(b"x")  # which ends it at the other end
        assert await reader.read(100) == b""
        writer.close()


async def test_a_time_without_a_ready_pod_is_told_and_ends(cluster: Cluster):
    cluster.show("ns/a")
    async with cluster.forward():
        cluster.show()

        async def told() -> bool:
            return bool(cluster.said)

        await until(told, seconds=60, awaited="the loss to be told")
        assert cluster.said == [f"no gateway pod is ready: port {cluster.port} waits for one"]
        assert await cluster.ask() == ""
        cluster.found = None  # an API server that does not answer changes nothing
        cluster.show("ns/b")
        await cluster.until_led_to("b")


async def test_no_ready_pod_at_the_start_is_an_error(cluster: Cluster):
    cluster.show(present=("ns/a",))
    with pytest.raises(LocalError, match="No gateway pod is ready"):
        async with cluster.forward():
            pytest.fail("it leads nowhere")
