"""kubectl logs, exec and port-forward reach a pod through the API server, as a user types them."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import aiohttp
import pytest

from vlm_cli.logs.command import logs
from vlm_local.client import Client
from vlm_local.controlplane import ControlPlane

from .pods import Pods, pod, server

pytestmark = pytest.mark.cluster
ECHO = """
import os, signal, socketserver
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
print('serving', flush=True)
socketserver.ThreadingTCPServer((os.environ['POD_IP'], 8080), Echo).serve_forever()
"""


async def kubectl(cluster: ControlPlane, pods: Pods, *words: str, stdin: str | None = None):
    space = pods.path.split("/")[4]
    return await asyncio.to_thread(cluster.kubectl, "-n", space, *words, stdin=stdin, check=False)


async def test_exec_has_output_errors_and_the_exit_code(cluster: ControlPlane, pods: Pods):
    await pods.create(server("p"))
    await pods.until_logged("p", "serving")
    command = ["sh", "-c", "echo out; echo err >&2; exit 4"]
    done = await kubectl(cluster, pods, "exec", "p", "--", *command)
    assert (done.returncode, done.stdout) == (4, "out\n")
    assert done.stderr.startswith("err\n")


async def test_exec_reads_what_is_piped_into_it(cluster: ControlPlane, pods: Pods):
    await pods.create(server("p"))
    await pods.until_logged("p", "serving")
    text = "line\n" * 20_000
    done = await kubectl(cluster, pods, "exec", "-i", "p", "--", "cat", stdin=text)
    assert (done.returncode, done.stdout) == (0, text)


async def test_port_forward_carries_several_connections_at_once(cluster: ControlPlane, pods: Pods):
    env = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    await pods.create(pod("p", ECHO, env=env))
    await pods.until_logged("p", "serving")
    async with _port_forward(cluster, pods, "p", 8080) as port:
        payloads = [bytes([number]) * 300_000 for number in range(8)]
        assert await asyncio.gather(*(_echoed(port, one) for one in payloads)) == payloads


async def test_a_websocket_port_forward_carries_bytes_both_ways(cluster: ControlPlane, pods: Pods):
    env = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    await pods.create(pod("p", ECHO, env=env))
    await pods.until_logged("p", "serving")
    access = cluster.access
    url = f"{access.server}{pods.path}/p/portforward?ports=8080"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            url, protocols=("v4.channel.k8s.io",), ssl=access.ssl_context()
        ) as channel,
    ):
        opened = {await channel.receive_bytes(), await channel.receive_bytes()}
        assert opened == {bytes([number]) + struct.pack("<H", 8080) for number in (0, 1)}
        await channel.send_bytes(b"\0hello")
        assert await channel.receive_bytes() == b"\0hello"


async def test_a_port_without_a_listener_is_reported(cluster: ControlPlane, pods: Pods):
    await pods.create(server("p"))
    await pods.until_logged("p", "serving")
    access = cluster.access
    url = f"{access.server}{pods.path}/p/portforward?ports=9"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            url, protocols=("v4.channel.k8s.io",), ssl=access.ssl_context()
        ) as channel,
    ):
        said = [await channel.receive_bytes() for _ in range(3)]
        assert said[2].startswith(b"\1nothing listens on port 9")


async def test_logs_can_be_followed_cut_and_stamped(cluster: ControlPlane, pods: Pods):
    program = "import time\nfor n in range(5): print(n); time.sleep(0.1)"
    await pods.create(pod("p", program, spec={"restartPolicy": "Never"}))
    await pods.until_logged("p", "0")
    followed = await kubectl(cluster, pods, "logs", "-f", "p")
    assert followed.stdout == "0\n1\n2\n3\n4\n"
    assert (await kubectl(cluster, pods, "logs", "p", "--tail=2")).stdout == "3\n4\n"
    stamped = (await kubectl(cluster, pods, "logs", "p", "--timestamps", "--tail=1")).stdout
    assert stamped.startswith("20")
    assert stamped.endswith("Z 4\n")
    assert (await kubectl(cluster, pods, "logs", "p", "--limit-bytes=3")).stdout == "0\n1"


async def test_vlm_logs_merges_and_follows_the_logs_of_pods(
    cluster: ControlPlane, pods: Pods, capsys: pytest.CaptureFixture[str]
):
    program = "import time\nfor n in range(5): print('{} line', n, flush=True); time.sleep(0.1)"
    for name in ("a", "b"):
        manifest = pod(name, program.replace("{}", name), spec={"restartPolicy": "Never"})
        manifest["metadata"].setdefault("labels", {})["triptych.dev/service"] = "demo"
        await pods.create(manifest)
    following = asyncio.create_task(
        logs(
            "demo",
            follow=True,
            namespace=pods.path.split("/")[4],
            kubeconfig=str(cluster.kubeconfig),
        )
    )
    lines: list[str] = []
    try:
        async with asyncio.timeout(60):
            while len(lines) < 10:
                await asyncio.sleep(0.05)
                lines += capsys.readouterr().out.splitlines()
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    for name in ("a", "b"):
        own = [line for line in lines if line.startswith(f"{name}  ")]
        assert own == [f"{name}  {name} line {number}" for number in range(5)]


async def test_a_node_answers_only_the_api_server(cluster: ControlPlane, api: Client):
    nodes = await api.get("/api/v1/nodes")
    address = nodes["items"][0]["status"]["addresses"][0]["address"]
    context = cluster.access.ssl_context()  # the administrator's certificate
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://{address}:10250/healthz", ssl=context) as answer,
    ):
        assert answer.status == 403
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session:
            await session.get(f"https://{address}:10250/healthz", ssl=False)


@contextlib.asynccontextmanager
async def _port_forward(
    cluster: ControlPlane, pods: Pods, name: str, port: int
) -> AsyncIterator[int]:
    forwarder = await asyncio.create_subprocess_exec(
        str(cluster.binaries["kubectl"]),
        f"--kubeconfig={cluster.kubeconfig}",
        *("-n", pods.path.split("/")[4], "port-forward", f"pod/{name}", f":{port}"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert forwarder.stdout is not None
    try:
        line = (await forwarder.stdout.readline()).decode()
        yield int(line.split("127.0.0.1:")[1].split()[0])
    finally:
        forwarder.terminate()
        await forwarder.wait()


async def _echoed(port: int, payload: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(payload)
    writer.write_eof()
    try:
        return await reader.readexactly(len(payload))
    finally:
        writer.close()
        await writer.wait_closed()
