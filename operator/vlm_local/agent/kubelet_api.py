"""A node's HTTPS endpoint, for the API server alone: logs, exec, port-forward.

kubectl ─▶ API server ─▶ https://<node address>:10250
                           /containerLogs/<namespace>/<pod>/<container>
                           /exec/<namespace>/<pod>/<container>?command=…      SPDY
                           /portForward/<namespace>/<pod>?port=N              SPDY or WebSocket
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime

import aiohttp
from aiohttp import web

from vlm_local.pki import Authority, Pair

from .container import Container
from .logs import LogOptions
from .pod import Pod
from .status import Waiting
from .streams import forward
from .upgrade import EXEC_PROTOCOL, FindPod, Front

API_SERVER = "kube-apiserver-kubelet-client"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class KubeletApi:
    """The endpoints of a node. `find_pod` returns the pod of a namespace and name."""

    def __init__(self, find_pod: FindPod) -> None:
        self._find_pod = find_pod

    @contextlib.asynccontextmanager
    async def serve(
        self, sockets: Sequence[socket.socket], tls: ssl.SSLContext
    ) -> AsyncIterator[None]:
        """Answer on `sockets` until the block ends."""
        app = web.Application(middlewares=[_api_server_only])
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/portForward/{namespace}/{pod}", self._forward)
        app.router.add_get("/healthz", _healthy)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        assert runner.server is not None
        kept: set[asyncio.Task[None]] = set()
        http = runner.server
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(
                lambda: Front(self._find_pod, http, _admitted, kept), sock=one, ssl=tls
            )
            for one in sockets
        ]
        try:
            yield
        finally:
            for server in servers:
                server.close()
            for task in kept:
                task.cancel()
            await asyncio.gather(*kept, return_exceptions=True)
            await runner.cleanup()

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        container = self._container(request)
        options = LogOptions.parse(request.query, now=datetime.now(UTC))
        index = -2 if request.query.get("previous") == "true" else -1
        if len(container.logs) < -index:
            raise web.HTTPBadRequest(text=_no_log(container, previous=index == -2))
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for piece in container.logs[index].read(options):
            await response.write(piece)
        await response.write_eof()
        return response

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Port-forward over a WebSocket: per port a data and an error channel, by first byte."""
        pod = self._pod(request)
        ports = [int(port) for port in request.query.getall("port", [])]
        if not ports:
            raise web.HTTPBadRequest(text="port-forward needs a query parameter port")
        channel = web.WebSocketResponse(protocols=(EXEC_PROTOCOL,))
        await channel.prepare(request)
        ends = [_Numbered(channel, number) for number in range(2 * len(ports))]
        for number, one in enumerate(ends):  # each channel opens with its port
            await one.send(struct.pack("<H", ports[number // 2]))
        tasks = [asyncio.create_task(_distribute(channel, ends))]
        tasks += [
            asyncio.create_task(forward(data, error, host=pod.facts.pod_ip, port=port))
            for port, data, error in zip(ports, ends[::2], ends[1::2], strict=True)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()
        return channel

    def _pod(self, request: web.Request) -> Pod:
        where = request.match_info
        pod = self._find_pod(where["namespace"], where["pod"])
        if pod is None:
            raise web.HTTPNotFound(text=f"no pod {where['pod']} on this node")
        return pod

    def _container(self, request: web.Request) -> Container:
        name = request.match_info["container"]
        container = self._pod(request).container(name)
        if container is None:
            raise web.HTTPNotFound(text=f"the pod has no container {name}")
        return container


class _Numbered:
    """One channel of a WebSocket whose messages begin with the channel's number."""

    def __init__(self, socket: web.WebSocketResponse, number: int) -> None:
        self._socket = socket
        self._number = number
        self._incoming: asyncio.Queue[bytes] = asyncio.Queue(maxsize=64)

    async def received(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._incoming.get()

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            await self._socket.send_bytes(bytes([self._number]) + data)

    async def close(self) -> None:
        """Do nothing: a channel of this protocol ends with its socket."""

    async def feed(self, piece: bytes) -> None:
        await self._incoming.put(piece)


async def _distribute(socket: web.WebSocketResponse, channels: Sequence[_Numbered]) -> None:
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY and len(message.data) > 1:
            number = message.data[0]
            if number < len(channels):
                await channels[number].feed(message.data[1:])


def server_context(authority: Authority, pair: Pair) -> ssl.SSLContext:
    """Return a TLS context with `pair` that requests a client certificate of its CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.certificate)
    context.load_cert_chain(pair.certificate, pair.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _admitted(transport: asyncio.BaseTransport | None) -> bool:
    """Whether the client is the API server. TLS has verified its certificate."""
    certificate = transport.get_extra_info("peercert") if transport else None
    names = [value for part in (certificate or {}).get("subject", ()) for _, value in part]
    return API_SERVER in names


@web.middleware
async def _api_server_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not _admitted(request.transport):
        raise web.HTTPForbidden(text="only the API server may connect")
    return await handler(request)


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def _no_log(container: Container, *, previous: bool) -> str:
    name, state = container.view.name, container.view.state
    if previous:
        return f'previous terminated container "{name}" not found'
    reason = state.reason if isinstance(state, Waiting) else "ContainerCreating"
    return f'container "{name}" is waiting to start: {reason}'
