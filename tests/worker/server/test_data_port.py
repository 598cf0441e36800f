"""The producer of data connections, and consumers that do with them what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from worker.transfer.fetching import (
    PATIENT,
    SECONDS,
    SHORT,
    ProducerSide,
    call_of,
    fetched,
    frames_of,
    linked,
    listening,
    transfer_of,
    until,
)
from worker.wire.test_status import ERRORS

from vlm_worker.errors import EngineError, PeerLostError, WorkerError
from vlm_worker.server.data_port import DataPort
from vlm_worker.transfer.data_connections import UnreachableError
from vlm_worker.wire.data_protocol import LENGTH, MAX_REQUEST_BYTES, Fetch, request_to
from vlm_worker.wire.frames import HEADER_BYTES, Frame, FrameBatches
from vlm_worker.wire.messages import FetchCall

pytestmark = pytest.mark.usefixtures("clean")

ONE, TWO = transfer_of("t-1"), transfer_of("t-2")
REQUEST = request_to(Fetch.KV, call_of(ONE))


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A consumer that sends and reads bytes as it likes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that still comes."""
    async with asyncio.timeout(SECONDS):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
        return b""


# ---- fetches -------------------------------------------------------------------------------------


async def test_fetches_at_once_get_what_each_asked_for() -> None:
    producer = ProducerSide(ONE, TWO)
    producer.go.clear()
    async with listening(producer.serve) as (_, port), linked(port) as one, linked(port) as two:
        fetching = [
            asyncio.create_task(fetched(link, transfer, fetch=fetch))
            for link, transfer, fetch in (
                (one, ONE, Fetch.KV),
                (one, TWO, Fetch.EMBEDDING),
                (two, TWO, Fetch.KV),
            )
        ]
        await until(lambda: producer.num_open == 3)
        producer.go.set()
        assert await asyncio.gather(*fetching) == [ONE.data, TWO.data, TWO.data]
        assert sorted(producer.fetches, key=str) == [Fetch.EMBEDDING, Fetch.KV, Fetch.KV]
        await until(lambda: producer.num_open == 0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("early", [True, False])
async def test_an_error_arrives_as_itself(error: WorkerError, early: bool) -> None:
    producer = ProducerSide(ONE)
    producer.error = error

    async def refuse(fetch: Fetch, call: FetchCall) -> FrameBatches:
        raise error
        yield

    async with (
        listening(refuse if early else producer.serve) as (_, port),
        linked(port) as link,
    ):
        with pytest.raises(type(error)) as raised:
            await fetched(link, ONE)
    assert type(raised.value) is type(error)
    assert (str(raised.value), vars(raised.value)) == (str(error), vars(error))


async def test_a_defect_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    producer = ProducerSide()  # a KeyError: there is no such transfer
    async with listening(producer.serve) as (_, port), linked(port) as link:
        with pytest.raises(EngineError, match="KeyError"):
            await fetched(link, ONE)
    assert [record.message for record in caplog.records if record.exc_info] == ["call failed"]


async def test_requests_are_answered_in_turn_however_their_bytes_come() -> None:
    async def serve(fetch: Fetch, call: FetchCall) -> FrameBatches:
        yield frames_of(ONE)

    async with listening(serve) as (_, port), connected(port) as (reader, writer):
        writer.write(REQUEST + REQUEST[:3])
        once = sum(8 + len(f.head) + f.payload.nbytes for f in frames_of(ONE))
        async with asyncio.timeout(SECONDS):
            first = await reader.readexactly(once)
            for byte in REQUEST[3:]:
                writer.write(bytes([byte]))
                await writer.drain()
            assert await reader.readexactly(once) == first


async def test_a_port_that_closes_during_an_accept_closes_that_connection_too() -> None:
    port = DataPort(ProducerSide(ONE).serve, PATIENT)
    number = port.open("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", number)) as theirs:
        while not port._tasks:  # noqa: ASYNC110  the very turn in which it is accepted
            await asyncio.sleep(0)
        assert port.num_connections == 1
        assert not port._idle, "its task has not started"
        await port.close()
        assert port.num_connections == 0
        theirs.settimeout(SECONDS)
        assert theirs.recv(1) == b""


# ---- consumers that do not keep to it ------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        LENGTH.pack(MAX_REQUEST_BYTES + 1),
        LENGTH.pack(2**32 - 1),
        REQUEST + LENGTH.pack(2**31),
        bytes(range(256)) * 64,
        b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
    ],
    ids=["too long", "endless", "after one", "garbage", "another protocol"],
)
async def test_what_is_no_request_closes_its_connection_and_no_other(said: bytes) -> None:
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with listening(producer.serve) as (served, port), linked(port) as link:
        fetching = asyncio.create_task(fetched(link, ONE))
        await until(lambda: producer.num_open == 1)
        async with connected(port) as (reader, writer):
            writer.write(said)
            await until(lambda: served.num_connections == 2)
            producer.go.set()
            await until_closed(reader)
        assert await fetching == ONE.data
        await until(lambda: served.num_connections == 1)


@pytest.mark.parametrize("data", [b"", b"\x07", b"\x12\x02\x08\x01", bytes(40)])
async def test_an_invalid_request_gets_an_error(data: bytes) -> None:
    async with (
        listening(ProducerSide(ONE).serve) as (_, port),
        connected(port) as (reader, writer),
    ):
        writer.write(LENGTH.pack(len(data)) + data)
        async with asyncio.timeout(SECONDS):
            kind, length = struct.unpack("<BxxxI", await reader.readexactly(8))
            assert kind == 1
            assert b"InvalidRequestError" in await reader.readexactly(length)


@pytest.mark.parametrize("reset", [True, False])
async def test_a_consumer_that_leaves_in_the_middle_ends_its_stream(reset: bool) -> None:
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with listening(producer.serve) as (served, port):
        async with connected(port) as (reader, writer):
            writer.write(REQUEST)
            await reader.readexactly(100)
            assert producer.num_open == 1
            if reset:
                writer.transport.abort()
        await until(lambda: producer.num_open == served.num_connections == 0)


class Endless:
    """Sends as long as somebody takes it."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_taken = 0

    async def serve(self, fetch: Fetch, call: FetchCall) -> FrameBatches:
        frame = Frame(bytes(HEADER_BYTES), memoryview(bytes(1 << 18)))
        self.num_open += 1
        try:
            while True:
                yield iter([frame])
                self.num_taken += 1
        finally:
            await asyncio.sleep(0.02)  # as an export that is under way has to end
            self.num_open -= 1

    async def until_stuck(self) -> None:
        """Until the kernel holds no more for whom it is."""
        num_taken = -1
        while num_taken != self.num_taken or not num_taken:
            num_taken = self.num_taken
            await asyncio.sleep(0.05)


async def test_a_consumer_that_leaves_and_took_nothing_ends_its_stream() -> None:
    producer = Endless()
    async with listening(producer.serve) as (served, port):
        with socket.create_connection(("127.0.0.1", port)) as consumer:
            consumer.sendall(REQUEST)
            await producer.until_stuck()
            assert producer.num_open == 1
        await until(lambda: producer.num_open == served.num_connections == 0)


async def test_a_consumer_that_takes_nothing_loses_its_stream() -> None:
    producer = Endless()
    async with listening(producer.serve, timers=SHORT) as (served, port):
        with socket.create_connection(("127.0.0.1", port)) as consumer:
            consumer.sendall(REQUEST)
            await producer.until_stuck()
            await until(lambda: producer.num_open == served.num_connections == 0)


async def test_more_connections_than_it_serves_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_worker.server.data_port.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("vlm_worker.server.data_port.MAX_ENDING", 0)
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with (
        listening(producer.serve) as (served, port),
        connected(port) as (_, one),
        connected(port) as (_, two),
        linked(port) as link,
    ):
        one.write(REQUEST)
        two.write(REQUEST)
        await until(lambda: producer.num_open == 2)  # both are at work
        with pytest.raises(UnreachableError):
            await fetched(link, ONE)
        one.close()
        await until(lambda: served.num_connections == 1)
        producer.go.set()
        assert await fetched(link, ONE) == ONE.data


async def test_idle_connections_make_way_for_active_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlm_worker.server.data_port.MAX_CONNECTIONS", 2)
    producer = ProducerSide(ONE)
    async with (
        listening(producer.serve) as (served, port),
        connected(port) as (first, _),
        linked(port) as link,
    ):
        await until(lambda: served.num_connections == 1)
        async with connected(port) as (second, _):
            await until(lambda: served.num_connections == 2)
            assert await fetched(link, ONE) == ONE.data
            assert await until_closed(first) == b"", "the one that was idle for longest"
            assert not second.at_eof()


async def test_a_connection_that_asks_for_nothing_is_closed_in_time() -> None:
    timers = dataclasses.replace(PATIENT, idle_connection=0.05)
    async with (
        listening(ProducerSide(ONE).serve, timers=timers) as (served, port),
        connected(port) as (reader, _),
    ):
        assert await until_closed(reader) == b""
        await until(lambda: served.num_connections == 0)


# ---- the end -------------------------------------------------------------------------------------


async def test_a_port_that_closes_ends_what_it_sends() -> None:
    producer, endless = ProducerSide(ONE), Endless()
    producer.go.clear()
    async with (
        listening(producer.serve) as (waits, one),
        listening(endless.serve) as (sends, two),
        linked(one) as link,
        aclosing(link.units(Fetch.KV, call_of(ONE), ONE.reader())) as units,
    ):
        await anext(units)
        with socket.create_connection(("127.0.0.1", two)) as consumer:
            consumer.sendall(REQUEST)
            await endless.until_stuck()
            async with asyncio.timeout(SECONDS):
                await waits.close()
                await sends.close()
        assert producer.num_open == endless.num_open == 0
        assert waits.num_connections == sends.num_connections == 0
        with pytest.raises(PeerLostError):
            await anext(units)


async def test_a_port_that_is_taken_is_said_so() -> None:
    async with listening(ProducerSide().serve) as (_, port):
        with pytest.raises(OSError, match="in use"):
            async with listening(ProducerSide().serve, port=port):
                pass
