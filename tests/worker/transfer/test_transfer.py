"""A producer and a consumer without a wire between them: everything in order, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.errors import CorruptTransferError, GoneError, InvalidRequestError, PeerLostError
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.transfer.consumer import Pull, checked_units
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import FinishReason, RequestKey
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, TransferId, join_frames

KEY = RequestKey("r-1", 1)
IDENTITY = TransferId(KEY, "t", b"b" * 16, b"f" * 16, "pod")
UNIT = 8


class ProducerSide:
    """Units that are all of one byte, their number."""

    def __init__(self, num_units: int, *, timers: Timers = PRODUCTION) -> None:
        self.num_units = num_units
        self.exported: list[int] = []
        self.producer = Producer(
            IDENTITY, unit_bytes=UNIT, max_units=num_units, export=self._export, timers=timers
        )

    def _export(self, first: int, count: int, buffer: memoryview) -> memoryview:
        self.exported.append(first)
        buffer[:] = b"".join(bytes([unit % 256]) * UNIT for unit in range(first, first + count))
        return buffer

    def finish(self, reason: FinishReason | None = None) -> None:
        self.producer.finish(Commit(self.num_units, 4 * self.num_units, 5, reason))

    def pull(self, first_unit: int = 0, *, seconds: float = 5.0) -> Pull:
        reader = FrameReader(
            IDENTITY, unit_bytes=UNIT, first_unit=first_unit, end_unit=self.num_units
        )
        frames = join_frames(self.producer.frame_batches(KEY, first_unit=first_unit))
        return Pull(
            checked_units(frames, reader, peer="peer", no_progress_seconds=seconds),
            reader,
            peer="peer",
        )


async def received(pull: Pull) -> list[int]:
    units: list[int] = []
    async with aclosing(pull.units()) as stream:
        async for some in stream:
            assert bytes(some.data) == b"".join(
                bytes([(some.first_unit + i) % 256]) * UNIT for i in range(some.num_units)
            )
            units += range(some.first_unit, some.first_unit + some.num_units)
    return units


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(0, 30))
def test_units_arrive_in_order_however_they_become_ready(steps: list[int], first: int) -> None:
    async def scenario() -> None:
        producer = ProducerSide(30)
        task = asyncio.create_task(received(producer.pull(first)))
        for step in steps:
            producer.producer.advance(step)
            await asyncio.sleep(0)
        producer.finish()
        assert await task == list(range(first, 30))

    asyncio.run(scenario())


async def test_a_reader_that_comes_after_the_end_gets_everything() -> None:
    producer = ProducerSide(5)
    producer.finish()
    pull = producer.pull()
    assert await received(pull) == [0, 1, 2, 3, 4]
    assert pull.commit.first_token_id == 5
    assert pull.num_bytes == 5 * UNIT


async def test_two_readers_do_not_disturb_each_other() -> None:
    producer = ProducerSide(9)
    tasks = [asyncio.create_task(received(producer.pull(first))) for first in (0, 4)]
    producer.producer.advance(3)
    await asyncio.sleep(0)
    producer.finish()
    assert await asyncio.gather(*tasks) == [list(range(9)), list(range(4, 9))]
    assert producer.producer.num_readers == 0


async def test_an_error_ends_readers_now_and_later() -> None:
    producer = ProducerSide(5)
    task = asyncio.create_task(received(producer.pull()))
    await asyncio.sleep(0)
    producer.producer.fail(GoneError("the lease expired"))
    for attempt in (task, received(producer.pull())):
        with pytest.raises(GoneError, match="lease expired"):
            await attempt
    with pytest.raises(GoneError):
        await producer.producer.settled()


async def test_a_unit_beyond_the_end_is_refused() -> None:
    producer = ProducerSide(5)
    producer.finish()
    frames = join_frames(producer.producer.frame_batches(KEY, first_unit=6))
    with pytest.raises(InvalidRequestError, match="beyond the 5 units"):
        _ = [frame async for frame in frames]


async def test_an_answer_that_ended_at_once_needs_no_units() -> None:
    producer = ProducerSide(5)
    producer.finish(FinishReason.STOP)
    pull = producer.pull()
    assert await received(pull) == []
    assert pull.commit.finish_reason is FinishReason.STOP


async def test_a_producer_that_waits_shows_that_it_lives() -> None:
    producer = ProducerSide(5, timers=PRODUCTION.scaled(0.01))
    task = asyncio.create_task(received(producer.pull(seconds=0.5)))
    await asyncio.sleep(1.0)
    assert not task.done(), "longer than the no-progress time, yet the producer lives"
    producer.finish()
    assert await task == [0, 1, 2, 3, 4]


async def test_a_silent_producer_is_lost() -> None:
    producer = ProducerSide(5)
    with pytest.raises(PeerLostError, match=r"no frame for 0\.05 s"):
        await received(producer.pull(seconds=0.05))
    assert producer.producer.num_readers == 0


async def test_a_stream_that_ends_without_its_commit_is_corrupt() -> None:
    producer = ProducerSide(5)
    producer.finish()

    async def cut() -> AsyncGenerator[bytes]:
        frames = [
            frame async for frame in join_frames(producer.producer.frame_batches(KEY, first_unit=0))
        ]
        for frame in frames[:-1]:
            yield frame

    reader = FrameReader(IDENTITY, unit_bytes=UNIT, first_unit=0, end_unit=5)
    with pytest.raises(CorruptTransferError, match="without its commit"):
        await received(
            Pull(
                checked_units(cut(), reader, peer="peer", no_progress_seconds=5.0),
                reader,
                peer="peer",
            )
        )


async def test_a_consumer_in_the_same_process_takes_the_whole_without_frames() -> None:
    producer = ProducerSide(3)
    task = asyncio.create_task(producer.producer.whole(3))
    await asyncio.sleep(0)
    producer.finish()
    assert bytes(await task) == b"".join(bytes([unit]) * UNIT for unit in range(3))
    with pytest.raises(CorruptTransferError):
        await producer.producer.whole(4)


async def test_a_piece_is_exported_when_the_one_before_has_been_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlm_worker.wire.frames.EXPORT_BYTES", 2 * UNIT)
    producer = ProducerSide(8)
    producer.finish()
    async with aclosing(join_frames(producer.producer.frame_batches(KEY, first_unit=0))) as frames:
        for exported in ([0], [0, 2], [0, 2, 4], [0, 2, 4, 6]):
            await anext(frames)
            assert producer.exported == exported, "its buffer is the next one's"
    assert producer.producer.num_readers == 0
    assert await received(producer.pull()) == list(range(8))


async def test_a_short_rest_goes_with_the_piece_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_worker.wire.frames.EXPORT_BYTES", 2 * UNIT)
    producer = ProducerSide(5)
    producer.finish()
    assert await received(producer.pull()) == list(range(5))
    assert producer.exported == [0, 2]


async def test_units_are_prepared_before_they_are_exported() -> None:
    producer = ProducerSide(3)

    async def prepare() -> None:
        assert not producer.exported
        producer.exported.append(-1)

    outgoing = Producer(
        IDENTITY, unit_bytes=UNIT, max_units=3, export=producer._export, prepare=prepare
    )
    outgoing.finish(Commit(3, 12, 5))
    assert (
        len([frame async for frame in join_frames(outgoing.frame_batches(KEY, first_unit=0))]) == 2
    )
    assert producer.exported == [-1, 0]


async def test_an_error_ends_a_run_that_is_being_sent() -> None:
    producer = ProducerSide(5)
    producer.finish()
    async with aclosing(producer.producer.frame_batches(KEY, first_unit=0)) as runs:
        async for run in runs:
            next(run)
            producer.producer.fail(GoneError("the lease expired"))
            with pytest.raises(GoneError, match="expired"):
                next(run)
            break
