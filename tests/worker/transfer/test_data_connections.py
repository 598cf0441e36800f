"""The consumer of a data connection, and producers that do with it what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
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

from vlm_worker.errors import CorruptTransferError, GoneError, PeerLostError, WorkerError
from vlm_worker.transfer.data_connections import (
    MAX_IDLE,
    DataConnectionPool,
    FetchThreads,
    UnreachableError,
)
from vlm_worker.wire.data_protocol import RECORD, Fetch

pytestmark = pytest.mark.usefixtures("clean")

ONE, TWO = transfer_of("t-1"), transfer_of("t-2")
STREAM = b"".join(
    RECORD.pack(0, len(frame.head) + frame.payload.nbytes) + frame.to_bytes()
    for frame in frames_of(ONE)
)


class Stub:
    """Says `stream` to every request, and then what `ending` is."""

    def __init__(self, stream: bytes, *, ending: str = "") -> None:
        self.stream = stream
        self.ending = ending
        self.num_connections = 0
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                writer.write(self.stream)
                await writer.drain()
                if self.ending == "reset":
                    writer.transport.abort()
                if self.ending == "close":
                    writer.close()


@contextlib.asynccontextmanager
async def stub(stream: bytes, *, ending: str = "") -> AsyncIterator[Stub]:
    """A producer of these bytes on a port."""
    one = Stub(stream, ending=ending)
    server = await asyncio.start_server(one.talk, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    async with server:
        yield one
        for writer in one.writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


# ---- producers that are lost ---------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 8, 60, 130, 3000, len(STREAM) - 1])
@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_producer_that_dies_in_the_middle_is_lost(num_bytes: int, ending: str) -> None:
    async with stub(STREAM[:num_bytes], ending=ending) as lost, linked(lost.port) as link:
        with pytest.raises(PeerLostError):
            await fetched(link, ONE)


async def test_a_producer_that_closes_before_its_first_byte_was_not_reached() -> None:
    async with stub(b"", ending="close") as lost, linked(lost.port) as link:
        with pytest.raises(UnreachableError):
            await fetched(link, ONE)
        assert link.is_usable, "it costs nothing to hear so"


@pytest.mark.parametrize("num_bytes", [0, 1, 60, 3000, len(STREAM) - 1])
async def test_a_producer_that_falls_silent_is_lost(num_bytes: int) -> None:
    async with stub(STREAM[:num_bytes]) as silent, linked(silent.port, timers=SHORT) as link:
        async with asyncio.timeout(SECONDS):
            with pytest.raises(PeerLostError):
                await fetched(link, ONE)


async def test_a_producer_that_only_waits_lives_until_the_deadline() -> None:
    timers = dataclasses.replace(SHORT, no_progress=1.0, fetch=1.5)
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with listening(producer.serve) as (_, port), linked(port, timers=timers) as link:
        with pytest.raises(PeerLostError, match="no end of a transfer in time"):
            await fetched(link, ONE)
        await until(lambda: producer.num_open == 0)


async def test_a_producer_that_waits_longer_than_silence_may_last_is_heard_to_the_end() -> None:
    timers = dataclasses.replace(PATIENT, no_progress=1.0)
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with listening(producer.serve) as (_, port), linked(port, timers=timers) as link:
        fetching = asyncio.create_task(fetched(link, ONE))
        done, _ = await asyncio.wait({fetching}, timeout=1.5 * timers.no_progress)
        assert not done
        producer.go.set()
        assert await fetching == ONE.data


# ---- which connection is used again --------------------------------------------------------------


async def test_a_connection_is_used_again_after_a_fetch_that_ended_well() -> None:
    async with stub(STREAM) as honest, linked(honest.port) as link:
        for _ in range(3):
            assert await fetched(link, ONE) == ONE.data
        assert honest.num_connections == 1


async def test_fetches_at_once_have_a_connection_each_and_few_are_kept() -> None:
    async with listening(ProducerSide(ONE).serve) as (served, port), linked(port) as link:
        got = await asyncio.gather(*(fetched(link, ONE) for _ in range(MAX_IDLE + 3)))
        assert got == [ONE.data] * (MAX_IDLE + 3)
        await until(lambda: served.num_connections == MAX_IDLE)


@pytest.mark.parametrize("error", [GoneError("expired"), ValueError("a defect")])
async def test_a_connection_is_not_used_again_after_a_failure(error: Exception) -> None:
    producer = ProducerSide(ONE)
    producer.error = error
    async with listening(producer.serve) as (served, port), linked(port) as link:
        with pytest.raises(WorkerError):
            await fetched(link, ONE)
        await until(lambda: served.num_connections == 0)


async def test_a_connection_is_not_used_again_after_a_refusal() -> None:
    """Of what is still on its way nobody knows whose it is."""
    damaged = bytearray(STREAM)
    damaged[len(STREAM) // 2] ^= 1
    async with stub(bytes(damaged)) as liar, linked(liar.port) as link:
        for _ in range(2):
            with pytest.raises(CorruptTransferError):
                await fetched(link, ONE)
        assert liar.num_connections == 2


async def test_a_connection_is_not_used_again_after_its_consumer_gave_up() -> None:
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with listening(producer.serve) as (served, port), linked(port) as link:
        async with aclosing(link.units(Fetch.KV, call_of(ONE), ONE.reader())) as units:
            await anext(units)
        await until(lambda: producer.num_open == served.num_connections == 0)
        producer.go.set()
        assert await fetched(link, ONE) == ONE.data


async def test_a_connection_over_which_more_came_than_its_fetch_is_not_used_again() -> None:
    async with stub(STREAM + STREAM[:40]) as talkative, linked(talkative.port) as link:
        for _ in range(2):
            assert await fetched(link, ONE) == ONE.data
        assert talkative.num_connections == 2


async def test_an_idle_connection_whose_producer_restarted_is_not_used() -> None:
    before, after = ProducerSide(ONE), ProducerSide(ONE)
    async with listening(before.serve) as (first, port), linked(port) as link:
        assert await fetched(link, ONE) == ONE.data
        await first.close()
        async with listening(after.serve, port=port):
            assert await fetched(link, ONE) == ONE.data
    assert (before.num_begun, after.num_begun) == (1, 1)


# ---- ports that cannot be reached ----------------------------------------------------------------


async def test_nothing_is_tried_before_a_port_is_known() -> None:
    threads = FetchThreads()
    link = DataConnectionPool("127.0.0.1:1", threads, SHORT)
    assert not link.is_usable
    link.learn(1)
    assert link.is_usable
    link.learn(None)
    assert not link.is_usable
    threads.close()


async def test_a_port_without_a_listener_is_tried_at_every_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlm_worker.transfer.data_connections.MAX_FETCHES", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with linked(port) as link:
        for _ in range(2):
            with pytest.raises(UnreachableError):
                await fetched(link, ONE)
            assert link.is_usable
        async with listening(ProducerSide(ONE).serve, port=port):
            assert await fetched(link, ONE) == ONE.data


async def test_a_port_that_does_not_answer_is_left_alone_until_another_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        # the kernel takes no more of them than this one
        with socket.create_connection(("127.0.0.1", port)):
            async with linked(port, timers=dataclasses.replace(PATIENT, connect=0.2)) as link:
                with pytest.raises(UnreachableError):
                    await fetched(link, ONE)
                assert not link.is_usable
                link.learn(port)
                assert not link.is_usable, "it is the same"
                async with listening(ProducerSide(ONE).serve) as (_, other):
                    link.learn(other)
                    assert await fetched(link, ONE) == ONE.data


async def test_more_fetches_than_there_are_threads_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlm_worker.transfer.data_connections.MAX_FETCHES", 2)
    producer = ProducerSide(ONE, TWO)
    producer.go.clear()
    async with listening(producer.serve) as (_, port), linked(port) as link:
        fetching = [asyncio.create_task(fetched(link, one)) for one in (ONE, TWO)]
        await asyncio.sleep(0)
        assert not link.is_usable, "those that connect are under way, too"
        await until(lambda: producer.num_open == 2)
        assert not link.is_usable
        producer.go.set()
        assert await asyncio.gather(*fetching) == [ONE.data, TWO.data]
        assert link.is_usable


# ---- ends ----------------------------------------------------------------------------------------


async def test_a_link_that_closes_ends_what_it_reads() -> None:
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with (
        listening(producer.serve) as (served, port),
        linked(port) as link,
        aclosing(link.units(Fetch.KV, call_of(ONE), ONE.reader())) as units,
    ):
        await anext(units)
        link.close()
        with pytest.raises(PeerLostError):
            await anext(units)
        await until(lambda: producer.num_open == served.num_connections == 0)


async def test_a_fetch_that_is_cancelled_lets_go_of_everything() -> None:
    producer = ProducerSide(ONE)
    producer.go.clear()
    async with listening(producer.serve) as (served, port), linked(port) as link:
        for _ in range(3):
            fetching = asyncio.create_task(fetched(link, ONE))
            await until(lambda: producer.num_open == 1)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await until(lambda: producer.num_open == served.num_connections == 0)
        assert link.is_usable
