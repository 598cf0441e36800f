"""Blocks lent to a thread that writes: they are nobody else's until it has ended, and come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.talk import events, text, tokens

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.sequences import ReceiveResult
from vlm_worker.errors import CorruptTransferError, GoneError, OverloadedError
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import Request, TokenEvent
from vlm_worker.wire.buffers import HostRegions, LiveRegions, host_views

BLOCK_BYTES = 4 * 8


async def blocks_of(engine: Engine, request: Request) -> tuple[list[bytes], int]:
    """What prefill makes of a prompt: its blocks, and the first token."""
    told = await events(engine.submit_prefill(request, for_peer=True))
    first = next(event.token_id for event in told if isinstance(event, TokenEvent))
    count = -(-len(request.token_ids) // 4)
    data = await asyncio.to_thread(engine.readable_blocks.copy, request.key, 0, count)
    await engine.release(request.key)
    return [bytes(data[at : at + BLOCK_BYTES]) for at in range(0, data.nbytes, BLOCK_BYTES)], first


async def lent(engine: Engine, request: Request) -> list[memoryview]:
    """The memory of a prompt of which nothing is here."""
    await engine.reserve(request.key, len(request.token_ids) + 1)
    receipt = await engine.receive(request, in_place=True)
    assert receipt.first_block == 0
    assert isinstance(receipt.memory, HostRegions)
    return list(receipt.memory.views)


def fill(memory: list[memoryview], blocks: list[bytes]) -> None:
    for buffer, block in zip(memory, blocks, strict=True):
        buffer[:] = block


async def test_what_is_written_in_its_place_is_decoded_as_if_computed_here(start: Any) -> None:
    here, there = start(), start()
    request = text(length=22)
    blocks, first = await blocks_of(here, request)
    memory = await lent(there, request)
    assert [buffer.nbytes for buffer in memory] == [BLOCK_BYTES] * 6
    await asyncio.to_thread(fill, memory, blocks)
    await there.confirm_blocks(request.key, 0, 4)
    await there.confirm_blocks(request.key, 4, 2)
    there.return_blocks(request.key)
    told = await events(await there.start_decode(request.key, first))
    assert [first, *tokens(told)] == answer_alone(request)
    assert there.stats().inflight == 0


async def test_what_was_confirmed_is_a_prefix_for_others_and_the_rest_is_not(start: Any) -> None:
    here, there = start(), start()
    request = text(length=22)
    blocks, _ = await blocks_of(here, request)
    memory = await lent(there, request)
    fill(memory, blocks)
    await there.confirm_blocks(request.key, 0, 3)
    there.return_blocks(request.key)
    await there.cancel(request.key)
    again = text("again", length=22)
    await there.reserve(again.key, 23)
    receipt = await there.receive(again, in_place=True)
    assert receipt.first_block == 3
    assert isinstance(receipt.memory, HostRegions)
    assert len(receipt.memory.views) == 3
    there.return_blocks(again.key)
    await there.release(again.key)


async def test_blocks_of_an_ended_request_are_not_reused_while_they_are_lent(
    start: Any,
) -> None:
    """Whoever still writes there writes into nobody's answer."""
    engine: Engine = start(ChecksumRunner(17))  # 16 blocks, and the null block
    leaving, other = text("leaving", length=40), text("other", length=10)
    memory = await lent(engine, leaving)
    await engine.cancel(leaving.key)
    assert engine.stats().inflight == 1, "somebody still writes"
    with pytest.raises(GoneError):
        await engine.confirm_blocks(leaving.key, 0, 1)
    answer = engine.submit_prefill(other, for_peer=False)
    fill(memory, [b"\xff" * BLOCK_BYTES] * len(memory))
    assert tokens(await events(answer)) == answer_alone(other)
    with pytest.raises(OverloadedError):
        await engine.reserve(text("large").key, 64)
    engine.return_blocks(leaving.key)
    engine.return_blocks(leaving.key)
    await engine.reserve(text("large").key, 64)
    await engine.release(text("large").key)
    assert engine.stats().inflight == 0


async def test_blocks_lent_to_a_reader_are_nobody_elses_until_it_has_returned_them(
    start: Any,
) -> None:
    """A peer that reads a device's memory sees no other answer, though the request has ended."""
    engine: Engine = start(ChecksumRunner(17))
    held = text("held", length=40)
    await events(engine.submit_prefill(held, for_peer=True))
    before = bytes(await asyncio.to_thread(engine.readable_blocks.copy, held.key, 0, 10))
    live = engine.readable_blocks.read(held.key, 0, 10, memoryview(b""))
    assert isinstance(live, LiveRegions)
    returns = [await engine.lend_blocks(held.key, *units) for units in ((0, 4), (4, 10))]
    await engine.release(held.key)
    with pytest.raises(OverloadedError):
        await engine.reserve(text("large").key, 64)
    await events(engine.submit_prefill(text("other", length=10), for_peer=False))
    assert b"".join(host_views(live.regions)) == before
    with pytest.raises(GoneError):
        await engine.lend_blocks(held.key, 0, 1)
    for give_back in returns:
        give_back()
        give_back()
    await engine.reserve(text("large").key, 64)
    await engine.release(text("large").key)
    assert engine.stats().inflight == 0


async def test_a_writers_end_returns_no_loan_of_a_reader(start: Any) -> None:
    engine: Engine = start(ChecksumRunner(17))
    held = text("held", length=40)
    await events(engine.submit_prefill(held, for_peer=True))
    give_back = await engine.lend_blocks(held.key, 0, 10)
    engine.return_blocks(held.key)
    await engine.release(held.key)
    with pytest.raises(OverloadedError):
        await engine.reserve(text("large").key, 64)
    give_back()
    await engine.reserve(text("large").key, 64)
    await engine.release(text("large").key)


async def test_only_blocks_that_are_missing_can_be_confirmed(start: Any) -> None:
    engine: Engine = start()
    request = text(length=10)
    await lent(engine, request)
    await engine.confirm_blocks(request.key, 1, 1)
    for first, count in ((1, 1), (0, 2), (2, 2), (0, 0)):
        with pytest.raises(CorruptTransferError):
            await engine.confirm_blocks(request.key, first, count)
    with pytest.raises(CorruptTransferError, match=r"blocks \[0, 2\] never came"):
        await engine.start_decode(request.key, 5)
    await engine.release(request.key)
    engine.return_blocks(request.key)


async def test_where_no_other_thread_may_write_nothing_is_lent(start: Any) -> None:
    runner = ChecksumRunner()
    runner.lends_memory = False
    engine: Engine = start(runner)
    request = text(length=10)
    await engine.reserve(request.key, 11)
    assert await engine.receive(request, in_place=True) == ReceiveResult(first_block=0)
    engine.return_blocks(request.key)
    await engine.release(request.key)
    assert engine.stats().inflight == 0


async def test_nothing_is_lent_to_whom_nothing_is_reserved(start: Any) -> None:
    engine: Engine = start()
    with pytest.raises(GoneError):
        await engine.receive(text(), in_place=True)
    engine.return_blocks(text().key)
    told = await events(engine.submit_prefill(text(), for_peer=False))
    assert tokens(told) == answer_alone(text())
