"""SPDY frames: valid ones are parsed, and an invalid one ends only its connection."""

import asyncio
import contextlib
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_local.agent import spdy

HEADERS = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12),
    st.text(max_size=20),
    max_size=5,
)


class Client:
    """The other side: frames with one compression context, as spdystream makes them."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=spdy.DICTIONARY)
        self.reader = asyncio.StreamReader()

    def open(self, number: int, headers: dict[str, str], *, flags: int = 0) -> None:
        words = [word.encode() for pair in headers.items() for word in pair]
        block = struct.pack(">I", len(headers))
        block += b"".join(struct.pack(">I", len(word)) + word for word in words)
        packed = self._deflate.compress(block) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        body = struct.pack(">IIBB", number, 0, 0, 0) + packed
        self.reader.feed_data(spdy.control_frame(spdy.SYN_STREAM, body, flags))

    def data(self, number: int, body: bytes, *, flags: int = 0) -> None:
        self.reader.feed_data(spdy.data_frame(number, body, flags))


class Sink:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


async def served(client: Client) -> tuple[list[spdy.Stream], bytes]:
    sink = Sink()
    session = spdy.Session(client.reader, sink)  # type: ignore[arg-type]
    return [stream async for stream in session.streams()], sink.written


@given(st.lists(HEADERS, min_size=1, max_size=4))
def test_headers_come_through_one_compression_context(several: list[dict[str, str]]):
    async def run() -> list[dict[str, str]]:
        client = Client()
        for number, headers in enumerate(several):
            client.open(2 * number + 1, headers)
        client.reader.feed_eof()
        return [stream.headers for stream in (await served(client))[0]]

    assert asyncio.run(run()) == several


async def test_data_reaches_its_stream_in_order_until_it_is_closed():
    client = Client()
    client.open(1, {"streamtype": "data"})
    client.open(3, {"streamtype": "error"}, flags=spdy.FIN)
    client.data(1, b"one")
    client.data(99, b"of no stream")
    client.data(1, b"two", flags=spdy.FIN)
    client.reader.feed_eof()
    (data, error), written = await served(client)
    assert [piece async for piece in data.received()] == [b"one", b"two"]
    assert [piece async for piece in error.received()] == []
    assert struct.unpack(">HH", written[:4]) == (1 << 15 | spdy.VERSION, spdy.SYN_REPLY)


async def test_a_ping_is_answered_with_itself():
    client = Client()
    ping = spdy.control_frame(spdy.PING, struct.pack(">I", 7))
    client.reader.feed_data(ping)
    client.reader.feed_eof()
    assert await served(client) == ([], ping)


async def test_a_stream_ends_when_its_connection_does():
    client = Client()
    client.open(1, {})
    for _ in range(40):
        client.data(1, b"x")
    client.reader.feed_eof()
    [stream], _ = await served(client)
    assert b"".join([piece async for piece in stream.received()]) == b"x" * 40


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack(">HHI", 1 << 15 | 2, 1, 0), id="another version"),
        pytest.param(struct.pack(">II", 1, 0xFFFFFF), id="a frame of 16 MiB"),
        pytest.param(
            spdy.control_frame(spdy.SYN_STREAM, struct.pack(">IIBB", 1, 0, 0, 0) + b"no zlib"),
            id="headers that are not zlib",
        ),
    ],
)
async def test_nonsense_ends_the_connection(frame: bytes):
    client = Client()
    client.reader.feed_data(frame)
    client.reader.feed_eof()
    with pytest.raises(spdy.ProtocolError):
        await served(client)


@given(st.binary(max_size=64))
def test_a_header_block_is_read_or_refused(block: bytes):
    with contextlib.suppress(spdy.ProtocolError):
        spdy.read_headers(block)
