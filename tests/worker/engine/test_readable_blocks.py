"""Blocks are copied out beside the steps; a copy counts if its request was there to the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.talk import events, text, tokens

from vlm_worker.engine.attempts import ReadableBlocks
from vlm_worker.engine.engine import Engine
from vlm_worker.errors import GoneError, InvalidRequestError
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import BlocksReady, RequestKey
from vlm_worker.wire.buffers import LiveRegions, host_views

KEY = RequestKey("r", 0)
NO_ROOM = memoryview(b"")


class SlowCopies(ChecksumRunner):
    """A copy that has begun ends when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.copying, self.may_end = threading.Event(), threading.Event()

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        self.copying.set()
        assert self.may_end.wait(20)
        return super().export_blocks(block_ids, out)


async def test_blocks_are_copied_while_a_step_runs(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    stream = engine.submit_prefill(text(length=40), for_peer=True)  # steps of 16, 16 and 8 tokens
    async for event in stream:
        if isinstance(event, BlocksReady):
            break
    runner.gate.clear()
    before = runner.num_steps
    other = engine.submit_prefill(text("other"), for_peer=False)
    await until(lambda: runner.num_steps > before)
    assert (await asyncio.to_thread(engine.readable_blocks.copy, KEY, 0, 4)).nbytes == 4 * 4 * 8
    runner.gate.set()
    assert tokens(await events(other)) == answer_alone(text("other"))
    await events(stream)
    await engine.release(KEY)


@pytest.mark.parametrize("end", ["cancel", "release"])
async def test_a_copy_whose_request_ended_meanwhile_counts_for_nothing(
    start: Any, until: Any, end: str
) -> None:
    runner = SlowCopies()
    engine: Engine = start(runner)
    await events(engine.submit_prefill(text(), for_peer=True))
    copying = asyncio.create_task(asyncio.to_thread(engine.readable_blocks.copy, KEY, 0, 3))
    await until(runner.copying.is_set)
    await getattr(engine, end)(KEY)
    # its blocks are another's now
    await events(engine.submit_prefill(text("other", length=40), for_peer=False))
    runner.may_end.set()
    with pytest.raises(GoneError):
        await copying


async def test_blocks_that_lie_in_host_memory_are_read_there_and_checked_after(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await events(engine.submit_prefill(text(), for_peer=True))
    lying = engine.readable_blocks.read(KEY, 0, 2, NO_ROOM)
    assert isinstance(lying, LiveRegions)
    assert lying.regions.num_bytes == 2 * 4 * 8
    assert b"".join(host_views(lying.regions)) == bytes(engine.readable_blocks.copy(KEY, 0, 2))
    lying.check()
    with pytest.raises(InvalidRequestError, match="are ready"):
        engine.readable_blocks.read(KEY, 0, 99, NO_ROOM)
    await engine.release(KEY)
    with pytest.raises(GoneError):
        lying.check()
    with pytest.raises(GoneError):
        engine.readable_blocks.read(KEY, 0, 2, NO_ROOM)


def test_blocks_that_others_had_meanwhile_count_for_nothing_though_they_came_back() -> None:
    readable_blocks = ReadableBlocks(ChecksumRunner())
    readable_blocks.publish(KEY, [3, 4])
    before = readable_blocks.read(KEY, 0, 2, NO_ROOM)
    readable_blocks.revoke(KEY)
    readable_blocks.publish(KEY, [3, 4])
    after = readable_blocks.read(KEY, 0, 2, NO_ROOM)
    assert isinstance(before, LiveRegions)
    assert isinstance(after, LiveRegions)
    after.check()
    with pytest.raises(GoneError):
        before.check()


def test_blocks_that_lie_elsewhere_are_copied_into_the_room() -> None:
    runner, buffer = ChecksumRunner(), memoryview(bytearray(2 * 4 * 8))
    runner.lends_memory = False
    readable_blocks = ReadableBlocks(runner)
    readable_blocks.publish(KEY, [3, 4])
    assert readable_blocks.read(KEY, 0, 2, buffer) is buffer


def test_what_was_withdrawn_is_not_ready_until_it_is_shown_again() -> None:
    readable_blocks = ReadableBlocks(ChecksumRunner())
    readable_blocks.publish(KEY, [3, 4])
    assert readable_blocks.copy(KEY, 0, 2).nbytes == 2 * 4 * 8
    readable_blocks.revoke(KEY)
    with pytest.raises(InvalidRequestError, match="0 are ready"):
        readable_blocks.copy(KEY, 0, 1)
    assert readable_blocks.was_read(KEY), "a peer may hold what it read"
    readable_blocks.publish(KEY, [5])
    assert readable_blocks.copy(KEY, 0, 1).nbytes == 4 * 8
    readable_blocks.forget(KEY)
    assert not readable_blocks.was_read(KEY)


def test_a_copy_during_which_its_blocks_changed_hands_and_came_back_counts_for_nothing() -> None:
    class Preempting(ChecksumRunner):
        def export_blocks(
            self, block_ids: Sequence[int], out: memoryview | None = None
        ) -> memoryview:
            data = super().export_blocks(block_ids, out)
            readable_blocks.revoke(KEY)
            readable_blocks.publish(KEY, [3, 4])
            return data

    readable_blocks = ReadableBlocks(Preempting())
    readable_blocks.publish(KEY, [3, 4])
    with pytest.raises(GoneError):
        readable_blocks.copy(KEY, 0, 2)
