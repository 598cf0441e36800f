"""A node's HTTPS endpoint, which only the API server may use: logs, exec, port-forward.

kubectl ─▶ API server ─▶ https://<node address>:10250
                           /containerLogs/<namespace>/<pod>/<container>
                           /exec/<namespace>/<pod>/<container>?command=…      SPDY
                           /portForward/<namespace>/<pod>?port=N              SPDY or WebSocket

first request ─ "Upgrade: SPDY/3.1" ─▶ SPDY session ─▶ port-forward, exec
└ anything else ───────▶ aiohttp (logs, health, WebSocket port-forward)
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import aiohttp
from aiohttp import web

from vlm_local.pki import Authority, Pair

from . import spdy
from .container import Container
from .logs import LogOptions
from .pod import Pod
from .status import Waiting
from .streams import execute, forward

logger = logging.getLogger(__name__)
API_SERVER = "kube-apiserver-kubelet-client"
MAX_HEAD_BYTES = 64 << 10
FORWARD_PROTOCOL = "portforward.k8s.io"
EXEC_PROTOCOL = "v4.channel.k8s.io"
FindPod = Callable[[str, str], Pod | None]
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
        tasks: set[asyncio.Task[None]] = set()
        http = runner.server
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(lambda: _Front(self._find_pod, http, tasks), sock=one, ssl=tls)
            for one in sockets
        ]
        try:
            yield
        finally:
            for server in servers:
                server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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


class _Front(asyncio.Protocol):
    """Reads the head of a connection's first request, which decides its protocol."""

    def __init__(
        self,
        find_pod: FindPod,
        http: Callable[[], asyncio.Protocol],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._find_pod = find_pod
        self._http = http
        self._tasks = tasks
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._head += data
        if b"\r\n\r\n" not in self._head:
            if len(self._head) > MAX_HEAD_BYTES:
                self._transport.abort()
            return
        head, _, rest = self._head.partition(b"\r\n\r\n")
        request = _Request.parse(head.decode("latin-1"))
        if request.headers.get("upgrade", "").lower() == "spdy/3.1":
            self._serve_spdy(request, rest)
        else:
            handler = self._http()
            self._transport.set_protocol(handler)
            handler.connection_made(self._transport)
            handler.data_received(self._head)

    def _serve_spdy(self, request: "_Request", rest: bytes) -> None:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        writer = asyncio.StreamWriter(self._transport, protocol, reader, loop)
        reader.feed_data(rest)
        admitted = _admitted(self._transport)
        task = loop.create_task(self._serve(request, reader, writer, admitted=admitted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self,
        request: "_Request",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        admitted: bool,
    ) -> None:
        try:
            kind, _, rest = request.path.strip("/").partition("/")
            where = rest.split("/")
            pod = self._find_pod(*where[:2]) if admitted and len(where) >= 2 else None
            if pod is None or kind not in ("portForward", "exec"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            protocol = FORWARD_PROTOCOL if kind == "portForward" else EXEC_PROTOCOL
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
                b"X-Stream-Protocol-Version: " + protocol.encode() + b"\r\n\r\n"
            )
            session = spdy.Session(reader, writer)
            if kind == "portForward":
                await _forward_all(session, pod.facts.pod_ip)
            else:
                await _execute(session, pod, where[2], request.query)
        except Exception:  # a bad connection must not end the node
            logger.exception("a stream failed", extra={"path": request.path})
        finally:
            with contextlib.suppress(OSError):
                writer.close()


class _Request:
    """The head of an HTTP/1.1 request."""

    def __init__(self, target: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(target)
        self.path = parts.path
        self.query = parse_qs(parts.query)
        self.headers = headers

    @classmethod
    def parse(cls, head: str) -> "_Request":
        """Read the request line and header lines. Header names become lower case."""
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return cls(words[1] if len(words) > 1 else "/", headers)


async def _forward_all(session: spdy.Session, host: str) -> None:
    """Carry each pair of streams that shares a request id."""
    waiting: dict[str, dict[str, spdy.Stream]] = {}
    async with asyncio.TaskGroup() as group:
        async for stream in session.streams():
            request = stream.headers.get("requestid", "")
            pair = waiting.setdefault(request, {})
            pair[stream.headers.get("streamtype", "")] = stream
            if {"data", "error"} <= set(pair):
                del waiting[request]
                port = int(stream.headers["port"])
                group.create_task(forward(pair["data"], pair["error"], host=host, port=port))


async def _execute(
    session: spdy.Session, pod: Pod, name: str, query: Mapping[str, list[str]]
) -> None:
    """Run one command as soon as all requested streams are open."""
    flags = {"input": "stdin", "output": "stdout", "error": "stderr"}
    wanted = {"error", *(stream for key, stream in flags.items() if query.get(key) == ["1"])}
    container = pod.container(name)
    found: dict[str, spdy.Stream] = {}
    async with contextlib.aclosing(session.streams()) as opened:
        async for stream in opened:
            found[stream.headers.get("streamtype", "")] = stream
            if wanted <= set(found):
                break
        if container is None or container.process is None or not container.process.running:
            await found["error"].send(f"container {name} is not running".encode())
            return
        reading = asyncio.ensure_future(_drain(opened))
        try:
            await execute(container.process, query["command"], found)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _drain(opened: AsyncIterator[spdy.Stream]) -> None:
    """Read the connection to its end, so that data reaches the open streams."""
    async for _ in opened:
        pass


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
