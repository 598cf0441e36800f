"""Forwards a local port to a pod's port through the API server, as `kubectl port-forward` does.

client ─TCP─▶ 127.0.0.1:N ─one WebSocket per connection─▶ API server ─▶ kubelet ─▶ ready pod:port

The protocol is `v4.channel.k8s.io`. The first byte of a message is its channel: 0 for data, 1 for
errors. The first message of each channel is the port in two bytes. A connection stays with its pod
until the pod is deleted, so that a draining pod can end its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp

from vlm_cli.access import Access
from vlm_cli.output import CliError

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
CHUNK_BYTES = 32 * 1024
POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Names of pods: of all, and of the ready ones."""

    present: frozenset[str]
    ready: tuple[str, ...]


Find = Callable[[], Awaitable[Candidates | None]]


@contextlib.asynccontextmanager
async def forward(access: Access, *, pod: str, port: int) -> AsyncIterator[str]:
    """Yield the URL of a local port that forwards to the pod's port.

    Raises:
        CliError: port-forward is refused or fails.
    """
    async with _listening(access, port, local_port=0) as (forwarder, url):
        await forwarder.check(pod)
        forwarder.pod = pod
        yield url


@contextlib.asynccontextmanager
async def forward_to_ready(
    access: Access, *, find: Find, port: int, local_port: int, report: Callable[[str], None]
) -> AsyncIterator[str]:
    """Yield the URL of a local port that forwards to a ready pod while the block runs.

    `find` lists the pods; it returns None if the cluster does not answer. `port` is that of the
    pods, `local_port` that on 127.0.0.1. `report` gets a line if the pod changes, or there is none.

    Raises:
        CliError: no pod is ready, or port-forward is refused.
    """
    pods = await find()
    if pods is None or not pods.ready:
        raise CliError("No gateway pod is ready.")
    async with _listening(access, port, local_port=local_port) as (forwarder, url):
        await forwarder.check(pods.ready[0])
        forwarder.pod = pods.ready[0]
        following = asyncio.create_task(_follow(forwarder, find, local_port, report))
        try:
            yield url
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _follow(
    forwarder: Forwarder, find: Find, local_port: int, report: Callable[[str], None]
) -> None:
    """Poll the pods; if the current one is no longer ready, choose another."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        pods = await find()
        if pods is None:
            continue
        await forwarder.keep(pods.present)
        if forwarder.pod in pods.ready:
            continue
        if pods.ready:
            forwarder.pod = pods.ready[0]
            report(f"port {local_port} now leads to gateway pod {pods.ready[0]}")
        elif forwarder.pod is not None:
            forwarder.pod = None
            report(f"no gateway pod is ready: port {local_port} waits for one")


@contextlib.asynccontextmanager
async def _listening(
    access: Access, port: int, *, local_port: int
) -> AsyncIterator[tuple[Forwarder, str]]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        forwarder = Forwarder(session, access, port=port)
        server = await asyncio.start_server(forwarder.accept, "127.0.0.1", local_port)
        try:
            yield forwarder, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await forwarder.keep(frozenset())


class Forwarder:
    """Connections to one port of pods of a namespace.

    Attributes:
        pod: gets new connections; if None, new connections are closed.
    """

    def __init__(self, session: aiohttp.ClientSession, access: Access, *, port: int) -> None:
        self.pod: str | None = None
        self._session = session
        self._pods = f"{access.connection.server}/api/v1/namespaces/{access.namespace}/pods"
        self._port = port
        self._ssl = access.ssl_context() if self._pods.startswith("https") else True
        token = access.connection.token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tasks: dict[asyncio.Task[None], str] = {}

    async def check(self, pod: str) -> None:
        """Open one connection and close it.

        Raises:
            CliError: port-forward is refused or fails.
        """
        try:
            async with self._connect(pod):
                return
        except aiohttp.WSServerHandshakeError as error:
            raise CliError(
                f"port-forward to pod {pod} was refused: {error.status} {error.message}",
                "you need the right to create pods/portforward; or pass --url",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CliError(f"port-forward to pod {pod} failed: {error}", "or pass --url") from error

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one TCP connection until either side or `keep` ends it."""
        if self.pod is None:
            writer.close()
            return
        task = asyncio.create_task(self._forward(self.pod, reader, writer))
        self._tasks[task] = self.pod
        task.add_done_callback(self._tasks.pop)

    async def keep(self, pods: frozenset[str]) -> None:
        """End the connections to all other pods."""
        ended = [task for task, pod in self._tasks.items() if pod not in pods]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def _forward(
        self, pod: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with self._connect(pod) as channel:
                up = asyncio.create_task(_up(reader, channel))
                try:
                    await _down(channel, writer)
                finally:
                    up.cancel()
                    await asyncio.gather(up, return_exceptions=True)
        except (aiohttp.ClientError, OSError):
            writer.transport.abort()  # the client sees a reset connection and reports it
        finally:
            writer.close()

    def _connect(
        self, pod: str
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]:
        url = f"{self._pods}/{pod}/portforward?ports={self._port}"
        return self._session.ws_connect(
            url, protocols=(PROTOCOL,), headers=self._headers, ssl=self._ssl, max_msg_size=0
        )


async def _up(reader: asyncio.StreamReader, channel: aiohttp.ClientWebSocketResponse) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        await channel.send_bytes(bytes([DATA]) + chunk)
    await channel.close()


async def _down(channel: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    opened = {DATA: False, ERROR: False}
    async for message in channel:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        number, body = message.data[0], message.data[1:]
        if not opened.get(number, True):
            opened[number] = True  # the first message of a channel starts with the port
            body = body[2:]
        if number == ERROR and body:
            raise ConnectionError(body.decode(errors="replace"))
        if number == DATA and body:
            writer.write(body)
            await writer.drain()
