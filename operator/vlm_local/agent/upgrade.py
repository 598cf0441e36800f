"""The front of a kubelet endpoint: it handles upgraded connections, and gives HTTP to aiohttp.

first request ─ "Upgrade: SPDY/3.1" ─▶ SPDY session ─▶ port-forward, exec
└ anything else ───────▶ aiohttp (logs, health, WebSocket port-forward)
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import parse_qs, urlsplit

from . import spdy, streams
from .pod import Pod

logger = logging.getLogger(__name__)
MAX_HEAD_BYTES = 64 << 10
FORWARD_PROTOCOL = "portforward.k8s.io"
EXEC_PROTOCOL = "v4.channel.k8s.io"
FindPod = Callable[[str, str], Pod | None]


class Front(asyncio.Protocol):
    """Reads the head of a connection's first request and hands the connection on."""

    def __init__(
        self,
        find_pod: FindPod,
        http: Callable[[], asyncio.Protocol],
        admit: Callable[[asyncio.BaseTransport], bool],
        kept: set[asyncio.Task[None]],
    ) -> None:
        self._find_pod = find_pod
        self._http = http
        self._admit = admit
        self._kept = kept
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Collect the head, then decide."""
        assert self._transport is not None
        self._head += data
        if b"\r\n\r\n" not in self._head:
            if len(self._head) > MAX_HEAD_BYTES:
                self._transport.abort()
            return
        head, _, rest = self._head.partition(b"\r\n\r\n")
        request = Request.parse(head.decode("latin-1"))
        if request.headers.get("upgrade", "").lower() == "spdy/3.1":
            self._take(request, rest)
        else:
            handler = self._http()
            self._transport.set_protocol(handler)
            handler.connection_made(self._transport)
            handler.data_received(self._head)

    def _take(self, request: "Request", rest: bytes) -> None:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        writer = asyncio.StreamWriter(self._transport, protocol, reader, loop)
        reader.feed_data(rest)
        admitted = self._admit(self._transport)
        task = loop.create_task(self._serve(request, reader, writer, admitted=admitted))
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def _serve(
        self,
        request: "Request",
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
            logger.exception("a stream broke", extra={"path": request.path})
        finally:
            with contextlib.suppress(OSError):
                writer.close()


class Request:
    """The head of an HTTP/1.1 request."""

    def __init__(self, target: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(target)
        self.path = parts.path
        self.query = parse_qs(parts.query)
        self.headers = headers

    @classmethod
    def parse(cls, head: str) -> "Request":
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
                group.create_task(
                    streams.forward(pair["data"], pair["error"], host=host, port=port)
                )


async def _execute(
    session: spdy.Session, pod: Pod, name: str, query: Mapping[str, list[str]]
) -> None:
    """Run one command once all requested streams are open."""
    asked = {"input": "stdin", "output": "stdout", "error": "stderr"}
    wanted = {"error", *(stream for key, stream in asked.items() if query.get(key) == ["1"])}
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
            await streams.execute(container.process, query["command"], found)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _drain(opened: AsyncIterator[spdy.Stream]) -> None:
    """Read the connection on, so that data reaches the open streams."""
    async for _ in opened:
        pass
