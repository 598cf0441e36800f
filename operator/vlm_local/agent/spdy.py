"""The server's half of SPDY/3.1 framing, which API servers use for port-forward and exec.

    control frame   1|version 15|type 16|flags 8|length 24   SYN_STREAM, SYN_REPLY, RST, …
    data frame      0|stream id 31|flags 8|length 24

Header blocks are zlib with a dictionary that the protocol fixes, one context per direction. Flow
control windows are not used, because the client (moby/spdystream) does not use them.
"""

import asyncio
import struct
import zlib
from collections.abc import AsyncGenerator, AsyncIterator

VERSION = 3
SYN_STREAM, SYN_REPLY, RST_STREAM, PING, GOAWAY = 1, 2, 3, 6, 7
FIN = 1
MAX_FRAME_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 10
CHUNK_BYTES = 32 << 10

_WORDS = (
    "options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|accept-language|"
    "accept-ranges|age|allow|authorization|cache-control|connection|content-base|"
    "content-encoding|content-language|content-length|content-location|content-md5|"
    "content-range|content-type|date|etag|expect|expires|from|host|if-match|if-modified-since|"
    "if-none-match|if-range|if-unmodified-since|last-modified|location|max-forwards|pragma|"
    "proxy-authenticate|proxy-authorization|range|referer|retry-after|server|te|trailer|"
    "transfer-encoding|upgrade|user-agent|vary|via|warning|www-authenticate|method|get|status|"
    "200 OK|version|HTTP/1.1|url|public|set-cookie|keep-alive|origin"
)
_REST = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request"
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented"
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 "
    "Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age="
    "gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = b"".join(struct.pack(">I", len(word)) + word.encode() for word in _WORDS.split("|"))
DICTIONARY += _REST.encode()


class ProtocolError(Exception):
    """The peer sent data that is not SPDY/3.1."""


class Stream:
    """One stream that the client opened; its `headers` name its purpose."""

    def __init__(self, session: "Session", number: int, headers: dict[str, str]) -> None:
        self.headers = headers
        self._session = session
        self._number = number
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)

    async def received(self) -> AsyncIterator[bytes]:
        """Yield what the client sends, until it closes its half."""
        while (piece := await self._incoming.get()) is not None:
            yield piece

    async def send(self, data: bytes) -> None:
        """Send data in frames of at most `CHUNK_BYTES`."""
        for start in range(0, len(data), CHUNK_BYTES):
            await self._session.write(data_frame(self._number, data[start : start + CHUNK_BYTES]))

    async def close(self) -> None:
        """Close our half."""
        await self._session.write(data_frame(self._number, b"", flags=FIN))

    async def feed(self, piece: bytes | None) -> None:
        """Deliver received data; None means the end."""
        await self._incoming.put(piece)


class Session:
    """One connection after the upgrade."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, Stream] = {}
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)
        self._lock = asyncio.Lock()

    async def streams(self) -> AsyncGenerator[Stream, None]:
        """Yield each stream that the client opens, and deliver data, until the client disconnects.

        Raises:
            ProtocolError: it sent data that is not SPDY/3.1.
        """
        try:
            while True:
                head = await self._reader.readexactly(8)
                first, flags, length = struct.unpack(">IBxxx", head)[0], head[4], _length(head)
                body = await self._reader.readexactly(length)
                if first >> 31:
                    kind = _control_kind(first)
                    if kind == SYN_STREAM:
                        yield await self._open(body, flags)
                    elif kind == GOAWAY:
                        return
                    else:
                        await self._control(kind, body)
                else:
                    await self._data(first, body, flags)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for stream in self._streams.values():
                _end(stream)

    async def write(self, frame: bytes) -> None:
        """Write one frame; wait while the client is slow."""
        async with self._lock:
            self._writer.write(frame)
            await self._writer.drain()

    async def _open(self, body: bytes, flags: int) -> Stream:
        try:
            (number,) = struct.unpack(">I", body[:4])
            headers = read_headers(self._inflate.decompress(body[10:], MAX_HEADER_BYTES))
        except (struct.error, zlib.error) as error:
            raise ProtocolError(f"a SYN_STREAM that cannot be read: {error}") from error
        stream = Stream(self, number, headers)
        self._streams[number] = stream
        if flags & FIN:
            await stream.feed(None)
        block = self._deflate.compress(struct.pack(">I", 0))
        block += self._deflate.flush(zlib.Z_SYNC_FLUSH)
        await self.write(control_frame(SYN_REPLY, struct.pack(">I", number) + block))
        return stream

    async def _control(self, kind: int, body: bytes) -> None:
        if kind == PING:
            await self.write(control_frame(PING, body))
        elif kind == RST_STREAM:
            stream = self._streams.pop(struct.unpack(">I", body[:4])[0], None)
            if stream is not None:
                await stream.feed(None)

    async def _data(self, number: int, body: bytes, flags: int) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return  # late data of a stream that was reset is dropped
        if body:
            await stream.feed(body)
        if flags & FIN:
            await stream.feed(None)


def control_frame(kind: int, body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">HHI", 1 << 15 | VERSION, kind, flags << 24 | len(body)) + body


def data_frame(number: int, body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">II", number, flags << 24 | len(body)) + body


def read_headers(block: bytes) -> dict[str, str]:
    """Return the names and values of an uncompressed header block.

    Raises:
        ProtocolError: the block is incomplete.
    """
    words: list[str] = []
    position = 4
    try:
        for _ in range(2 * struct.unpack_from(">I", block)[0]):
            (length,) = struct.unpack_from(">I", block, position)
            words.append(block[position + 4 : position + 4 + length].decode())
            position += 4 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"a header block that cannot be read: {error}") from error
    return dict(zip(words[::2], words[1::2], strict=True))


def _length(head: bytes) -> int:
    length = int.from_bytes(head[5:8], "big")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes")
    return length


def _control_kind(first: int) -> int:
    if first >> 16 & 0x7FFF != VERSION:
        raise ProtocolError(f"SPDY version {first >> 16 & 0x7FFF}")
    return first & 0xFFFF


def _end(stream: Stream) -> None:
    """Close a stream whose connection ended. If its queue is full, drop the oldest data."""
    while True:
        try:
            stream._incoming.put_nowait(None)
        except asyncio.QueueFull:
            stream._incoming.get_nowait()
        else:
            return
