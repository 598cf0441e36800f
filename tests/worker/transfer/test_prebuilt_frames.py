"""Frames made before anybody asks arrive as any others do.

Two instances of a transport stand for two workers, with a data connection between them.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker.transfer.fetching import listening, running, until
from worker.transfer.rows import (
    DATA,
    KEY,
    UNIT,
    Consumer,
    Make,
    ProducerSide,
    meeting,
    shared,
)

from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.transfer import data_connections as data_link
from vlm_worker.transfer.transport import ByteStream
from vlm_worker.types import RequestKey

pytestmark = pytest.mark.usefixtures("clean")


# ---- what arrives --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_units", [1, 127, 128, 512, 576, 1024, 1025, 1200])
async def test_what_was_made_ahead_arrives_and_is_made_once(
    make: Make, threads: ThreadPoolExecutor, num_units: int
) -> None:
    data = (DATA * 3)[: num_units * UNIT]
    producer = ProducerSide(make(), data)
    async with meeting(producer, make()) as consumer:
        await producer.producer.prebuild_frames(threads, producer.transport)
        assert producer.num_exports == 1
        assert await consumer.fetch(num_units=num_units) == data
        assert producer.num_exports == 1


async def test_memory_that_was_made_ahead_before_carries_the_next_transfer(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    ours, theirs = make(), make()
    for _ in range(3):
        producer = ProducerSide(ours, secrets.token_bytes(len(DATA)))
        async with listening(producer.runs, timers=PRODUCTION) as (_, port):
            await producer.producer.prebuild_frames(threads, ours)
            assert await Consumer(port, theirs).fetch() == producer.data
        producer.producer.close()
        assert producer.comes_back()
    for transport in (ours, theirs):
        transport.close()


async def test_a_request_for_other_units_has_its_own_frames_built(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    ours = make()
    for key, first_unit, theirs in (
        (RequestKey("r-1", 2), 0, make()),
        (KEY, 5, make()),
        (KEY, 0, ByteStream()),
    ):
        producer = ProducerSide(ours)
        async with listening(producer.runs, timers=PRODUCTION) as (_, port):
            await producer.producer.prebuild_frames(threads, ours)
            found = await Consumer(port, theirs).fetch(key=key, first_unit=first_unit)
            assert found == DATA[first_unit * UNIT :]
            if ours.invitation() == theirs.invitation() and key == KEY and not first_unit:
                assert producer.num_exports == 1  # of a stream, to a stream
            else:
                assert producer.num_exports > 1
        producer.producer.close()
        assert producer.comes_back()
        theirs.close()
    ours.close()


async def test_what_was_made_ahead_is_for_one_consumer_and_the_next_has_his_own(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    producer = ProducerSide(make())
    async with meeting(producer, make()) as consumer:
        await producer.producer.prebuild_frames(threads, producer.transport)
        assert await consumer.fetch() == DATA
        assert await consumer.fetch() == DATA
        assert producer.num_exports > 1


async def test_a_request_during_a_prebuild_waits_for_it(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    producer = ProducerSide(make())
    async with meeting(producer, make()) as consumer:
        making = await producer.held(threads)
        fetching = asyncio.create_task(consumer.fetch())
        await until(lambda: producer.producer.num_readers == 1)
        producer.may_export.set()
        assert await fetching == DATA
        await making
        assert producer.num_exports == 1


async def test_nothing_is_prebuilt_for_a_running_read(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    producer = ProducerSide(make())
    async with meeting(producer, make()):
        runs = producer.producer.frame_batches(KEY, first_unit=0, large=True)
        await anext(runs)
        await producer.producer.prebuild_frames(threads, producer.transport)
        assert producer.num_exports == 0
        await runs.aclose()


async def test_without_room_nothing_is_made_ahead_and_all_bytes_travel(
    directory: Path, threads: ThreadPoolExecutor
) -> None:
    ours = shared(directory)
    others = [ours.expose(ours.invitation(), len(DATA)) for _ in range(3)]
    producer = ProducerSide(ours)
    async with listening(producer.runs, timers=PRODUCTION) as (_, port):
        await producer.producer.prebuild_frames(threads, ours)
        assert producer.num_exports == 0
        assert await Consumer(port, ours).fetch() == DATA
    for other in others:
        assert other is not None
        other.close()
    producer.producer.close()
    assert producer.comes_back()
    ours.close()


# ---- how it comes --------------------------------------------------------------------------------


async def test_rows_in_shared_memory_take_no_thread_at_either_end(
    directory: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_link, "AT_ONCE_SECONDS", 60.0)
    producer = ProducerSide(shared(directory))
    async with meeting(producer, shared(directory)) as consumer:
        await producer.producer.prebuild_frames(threads, producer.transport)
        before = running()
        assert await consumer.fetch() == DATA
        assert running() == before
