"""Short answers that the loop itself receives, and producers that do not bring them to an end."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import pytest
from worker.transfer.fetching import (
    SECONDS,
    SHORT,
    call_of,
    frames_of,
    linked,
    running,
    transfer_of,
    until,
)
from worker.transfer.test_data_connections import stub

from vlm_worker.errors import CorruptTransferError, PeerLostError
from vlm_worker.transfer import data_connections as data_link
from vlm_worker.transfer.data_connections import DataConnectionPool, UnreachableError
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import RECORD, Fetch
from vlm_worker.wire.frame_reader import FrameReader

pytestmark = pytest.mark.usefixtures("clean")

SMALL = transfer_of("t-3", num_units=3)
SMALL_STREAM = b"".join(
    RECORD.pack(0, len(frame.head) + frame.payload.nbytes) + frame.to_bytes()
    for frame in frames_of(SMALL)
)


async def fetched_at_once(link: DataConnectionPool) -> bytes:
    """SMALL, whose units might lie in shared memory."""
    buffer = bytearray(len(SMALL.data))
    reader = FrameReader(
        dataclasses.replace(SMALL.identity, pod_uid=None),
        unit_bytes=SMALL.unit_bytes,
        first_unit=0,
        end_unit=SMALL.end_unit,
        into=DestinationBuffers([memoryview(buffer)]),
    )
    call = dataclasses.replace(call_of(SMALL), transport="shared-memory/3", invitation=b"domain")
    async with aclosing(link.units(Fetch.EMBEDDING, call, reader)) as units:
        async for _ in units:
            pass
    return bytes(buffer)


async def test_a_short_answer_takes_no_thread_and_its_connection_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_link, "AT_ONCE_SECONDS", SECONDS)
    async with stub(SMALL_STREAM) as quick, linked(quick.port) as link:
        threads = running()
        for _ in range(3):
            assert await fetched_at_once(link) == SMALL.data
        assert running() == threads
        assert quick.num_connections == 1


@pytest.mark.parametrize("num_bytes", [1, 8, 60, 130, 700, len(SMALL_STREAM) - 1])
@pytest.mark.parametrize("ending", ["close", "reset", ""])
async def test_a_short_answer_that_breaks_off_is_lost_as_any_other(
    num_bytes: int, ending: str
) -> None:
    async with (
        stub(SMALL_STREAM[:num_bytes], ending=ending) as lost,
        linked(lost.port, timers=SHORT) as link,
    ):
        async with asyncio.timeout(SECONDS):
            with pytest.raises(PeerLostError):
                await fetched_at_once(link)


async def test_a_short_answer_that_is_damaged_is_refused_and_its_connection_left() -> None:
    damaged = bytearray(SMALL_STREAM)
    damaged[RECORD.size + 200] ^= 1
    async with stub(bytes(damaged)) as wrong, linked(wrong.port) as link:
        for number in range(2):
            with pytest.raises(CorruptTransferError, match="digest"):
                await fetched_at_once(link)
            assert wrong.num_connections == number + 1


@pytest.mark.parametrize("way", ["cancelled", "closed"])
async def test_a_reader_of_a_short_answer_frees_everything(way: str) -> None:
    async with stub(b"") as silent, linked(silent.port) as link:
        fetching = asyncio.create_task(fetched_at_once(link))
        await until(lambda: silent.num_connections == 1)
        if way == "cancelled":
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
        else:
            link.close()
            with pytest.raises(UnreachableError):
                await fetching
