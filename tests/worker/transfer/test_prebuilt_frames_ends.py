"""Frames made before anybody asks: what fails is told, and nothing of them stays behind.

Two instances of a transport stand for two workers, with a data connection between them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import pytest
from worker.transfer.fetching import until
from worker.transfer.rows import (
    DATA,
    KEY,
    Damaging,
    Make,
    ProducerSide,
    meeting,
    shared,
)

from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.wire.frames import Frame

pytestmark = pytest.mark.usefixtures("clean")


# ---- what is damaged, and what fails -------------------------------------------------------------


async def test_what_is_damaged_after_its_digest_is_caught_and_the_next_attempt_arrives(
    directory: Path, threads: ThreadPoolExecutor
) -> None:
    ours = shared(directory)
    damaging = Damaging(ours)
    producer = ProducerSide(damaging)  # type: ignore[arg-type]
    async with meeting(producer, shared(directory)) as consumer:
        await producer.producer.prebuild_frames(threads, producer.transport)
        with pytest.raises(CorruptTransferError, match="digest"):
            await consumer.fetch()
        assert await consumer.fetch() == DATA
        assert damaging.num_exposed == 2


@pytest.mark.parametrize("error", [GoneError("taken"), CorruptTransferError("of another size")])
async def test_a_failure_is_raised_to_every_request(
    make: Make, threads: ThreadPoolExecutor, error: Exception
) -> None:
    producer = ProducerSide(make())
    producer.error = error
    async with meeting(producer, make()) as consumer:
        await producer.producer.prebuild_frames(threads, producer.transport)
        with pytest.raises(type(error)):
            await consumer.fetch()
        producer.error = None
        assert await consumer.fetch() == DATA


async def test_a_defect_is_not_hidden_and_ends_no_fetch(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    producer = ProducerSide(make())
    producer.error = ValueError("a defect")
    async with meeting(producer, make()) as consumer:
        with pytest.raises(ValueError, match="a defect"):
            await producer.producer.prebuild_frames(threads, producer.transport)
        producer.error = None
        assert await consumer.fetch() == DATA


# ---- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "abandon", "fail"])
async def test_frames_that_are_not_requested_are_freed_however_the_request_ends(
    make: Make, threads: ThreadPoolExecutor, end: str
) -> None:
    producer = ProducerSide(make())
    outgoing = producer.producer
    async with meeting(producer, make()) as consumer:
        await outgoing.prebuild_frames(threads, producer.transport)
        assert bool(producer.transport.account.used) == bool(producer.transport.invitation())
        assert outgoing.exposed_bytes == 0, "nobody can be reading it"
        if end == "fail":
            outgoing.fail(GoneError("cancelled"))
        else:
            getattr(outgoing, end)()
        assert producer.comes_back()
        if end == "fail":
            with pytest.raises(GoneError):
                await consumer.fetch()


@pytest.mark.parametrize("end", ["close", "fail"])
@pytest.mark.parametrize("is_asked", [False, True])
async def test_an_end_during_a_prebuild_ends_the_requests_that_wait_for_it(
    make: Make, threads: ThreadPoolExecutor, end: str, is_asked: bool
) -> None:
    ours = make()
    producer = ProducerSide(ours)
    outgoing = producer.producer
    frames: list[Frame] = []

    async def read() -> None:
        runs = outgoing.frame_batches(
            KEY, first_unit=0, transport=ours, invitation=ours.invitation(), large=True
        )
        async with aclosing(runs):
            async for run in runs:
                frames.extend(run)

    async with meeting(producer, make()):
        making = await producer.held(threads)
        reading = asyncio.create_task(read()) if is_asked else None
        if reading is not None:
            await until(lambda: outgoing.num_readers == 1)
        if end == "fail":
            outgoing.fail(GoneError("released"))
        outgoing.close()
        producer.may_export.set()
        await making
        if reading is not None and (end == "fail" or ours.invitation()):
            with pytest.raises(GoneError):
                await reading
            assert len(frames) <= 1, "an opening, and no units"
        elif reading is not None:
            await reading
        assert producer.comes_back()
        assert outgoing.num_readers == 0


async def test_a_consumer_that_leaves_while_he_waits_frees_what_was_to_be_his(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    ours = make()
    producer = ProducerSide(ours)
    async with meeting(producer, make()) as consumer:
        making = await producer.held(threads)
        fetching = asyncio.create_task(consumer.fetch())
        await until(lambda: producer.producer.num_readers == 1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await until(lambda: producer.producer.num_readers == 0)
        assert producer.comes_back()
        producer.may_export.set()
        await making
        assert await consumer.fetch() == DATA


async def test_a_making_that_is_cancelled_ends_with_its_thread(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    producer = ProducerSide(make())
    async with meeting(producer, make()) as consumer:
        making = await producer.held(threads)
        making.cancel()
        done, _ = await asyncio.wait({making}, timeout=0)
        assert not done, "its thread still writes"
        producer.may_export.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert await consumer.fetch() == DATA
