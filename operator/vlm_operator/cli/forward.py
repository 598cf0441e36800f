"""A local port that leads to a pod's, through the API server: what `kubectl port-forward` does.

client ─TCP─▶ 127.0.0.1:N ─one WebSocket a connection─▶ API server ─▶ kubelet ─▶ pod:port

The protocol is `v4.channel.k8s.io`: the first byte of a message is its channel, 0 for data and 1
for errors; each channel opens with the port as two bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from vlm_operator.cli.access import Access
from vlm_operator.cli.errors import CliError

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
CHUNK_BYTES = 32 * 1024


class Forwarder:
    """Connections to one port of one pod."""

    def __init__(
        self, session: aiohttp.ClientSession, access: Access, *, pod: str, port: int
    ) -> None:
        self._session = session
        self._url = (
            f"{access.connection.server}/api/v1/namespaces/{access.namespace}/pods/{pod}"
            f"/portforward?ports={port}"
        )
        self._pod = pod
        self._ssl = access.ssl_context() if self._url.startswith("https") else True
        token = access.connection.token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def check(self) -> None:
        """Open one connection and close it; raises CliError where the way is barred."""
        try:
            async with self._connect():
                return
        except aiohttp.WSServerHandshakeError as error:
            raise CliError(
                f"port-forward to pod {self._pod} was refused: {error.status} {error.message}",
                "it takes the right to create pods/portforward; or pass --url",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CliError(
                f"port-forward to pod {self._pod} failed: {error}", "or pass --url"
            ) from error

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one TCP connection until either side ends it, or `close` does."""
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._connect() as channel:
                up = asyncio.create_task(_up(reader, channel))
                try:
                    await _down(channel, writer)
                finally:
                    up.cancel()
                    await asyncio.gather(up, return_exceptions=True)
        except (aiohttp.ClientError, OSError):
            writer.transport.abort()  # the client sees a broken connection, and says so
        finally:
            writer.close()

    def _connect(self) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]:
        return self._session.ws_connect(
            self._url, protocols=(PROTOCOL,), headers=self._headers, ssl=self._ssl, max_msg_size=0
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
            opened[number] = True  # the port's echo
            body = body[2:]
        if number == ERROR and body:
            raise ConnectionError(body.decode(errors="replace"))
        if number == DATA and body:
            writer.write(body)
            await writer.drain()


@contextlib.asynccontextmanager
async def forward(access: Access, *, pod: str, port: int) -> AsyncIterator[str]:
    """The URL of a local port that leads to the pod's; raises CliError where it cannot."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        forwarder = Forwarder(session, access, pod=pod, port=port)
        await forwarder.check()
        server = await asyncio.start_server(forwarder.accept, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await forwarder.close()
