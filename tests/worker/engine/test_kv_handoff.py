"""Embeddings and KV that come in and go out: asked for, checked, adopted, released."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.by_hand import ByHand
from worker.engine.talk import IMAGE, about_image, error, events, text, tokens

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import NeedItems
from vlm_worker.engine.sequences import ReceiveResult
from vlm_worker.errors import (
    CorruptTransferError,
    GoneError,
    InvalidRequestError,
    OverloadedError,
)
from vlm_worker.testing import VOCABULARY, ChecksumRunner, embed
from vlm_worker.types import (
    FinishedEvent,
    FinishReason,
    RequestKey,
)
from vlm_worker.wire.messages import CancelOutcome

# ---- embeddings ----------------------------------------------------------------------------------


async def test_missing_embeddings_are_asked_for_once_and_checked(start: Any) -> None:
    engine: Engine = start()
    request = about_image()
    stream = engine.submit_prefill(request, for_peer=False)
    assert await anext(stream) == NeedItems((0,))
    with pytest.raises(CorruptTransferError):
        await engine.put_embedding(request.key, 0, memoryview(b"short"))
    with pytest.raises(InvalidRequestError):
        await engine.put_embedding(request.key, 1, memoryview(b""))
    rows = memoryview(embed(IMAGE).tobytes())
    await engine.put_embedding(request.key, 0, rows)
    await engine.put_embedding(request.key, 0, rows)
    assert tokens(await events(stream)) == answer_alone(request, [IMAGE])
    await engine.put_embedding(request.key, 0, rows)  # too late, and no harm


async def test_an_embedding_made_here_is_found_without_being_put(start: Any) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    engine: Engine = start(runner)
    request = about_image()
    encoding = engine.encode(request.key, [IMAGE])
    prompt = engine.submit_prefill(request, for_peer=False)
    runner.gate.set()
    told = await events(prompt)
    assert not any(isinstance(event, NeedItems) for event in told)
    assert tokens(told) == answer_alone(request, [IMAGE])
    _ = [event async for event in encoding]
    engine.release_embedding(request.key, 0)


async def test_one_put_serves_all_requests_of_the_image(start: Any) -> None:
    engine: Engine = start()
    requests = [about_image("a"), about_image("b")]
    streams = [engine.submit_prefill(request, for_peer=False) for request in requests]
    assert [await anext(stream) for stream in streams] == [NeedItems((0,))] * 2
    await engine.put_embedding(requests[0].key, 0, memoryview(embed(IMAGE).tobytes()))
    for stream, request in zip(streams, requests, strict=True):
        assert tokens(await events(stream)) == answer_alone(request, [IMAGE])


async def test_an_encode_that_fails_makes_the_prompt_ask(start: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.bad_images.add(IMAGE.image_key)
    runner.gate.clear()
    engine: Engine = start(runner)
    request = about_image()
    encoding = engine.encode(request.key, [IMAGE])
    prompt = engine.submit_prefill(request, for_peer=False)
    runner.gate.set()
    _ = [event async for event in encoding]
    async for event in prompt:
        if isinstance(event, NeedItems):
            await engine.put_embedding(request.key, 0, memoryview(embed(IMAGE).tobytes()))
            break
    assert tokens(await events(prompt)) == answer_alone(request, [IMAGE])


# ---- hand-over -----------------------------------------------------------------------------------


async def test_only_announced_blocks_are_exported(start: Any) -> None:
    engine: Engine = start()
    stream = engine.submit_prefill(text(), for_peer=True)
    await events(stream)
    assert (
        await asyncio.to_thread(engine.readable_blocks.copy, text().key, 0, 3)
    ).nbytes == 3 * 4 * 8
    for first, count in ((0, 4), (3, 1), (-1, 1), (2, -1)):
        with pytest.raises(InvalidRequestError):
            await asyncio.to_thread(engine.readable_blocks.copy, text().key, first, count)
    await engine.release(text().key)
    with pytest.raises(GoneError):
        await asyncio.to_thread(engine.readable_blocks.copy, text().key, 0, 1)


async def test_a_reservation_is_refused_when_there_is_no_room_and_released_when_told(
    start: Any,
) -> None:
    engine: Engine = start(ChecksumRunner(17))
    await engine.reserve(RequestKey("a", 0), 40)
    await engine.reserve(RequestKey("a", 0), 40)  # idempotent
    assert engine.stats().kv is not None
    with pytest.raises(OverloadedError) as refused:
        await engine.reserve(RequestKey("b", 0), 40)
    assert refused.value.retry_after_seconds > 0
    await engine.release(RequestKey("a", 0))
    await engine.reserve(RequestKey("b", 0), 40)
    assert await engine.cancel(RequestKey("b", 0)) is CancelOutcome.CANCELLED_BEFORE_ADVERTISED


async def test_a_reservation_is_used_up_by_a_prefill_under_its_key(start: Any) -> None:
    engine: Engine = start(ChecksumRunner(17))
    await engine.reserve(text().key, 60)
    told = await events(engine.submit_prefill(text(), for_peer=False))
    assert isinstance(told[-1], FinishedEvent)
    assert engine.stats().inflight == 0


def test_a_reservation_too_small_for_its_prompt_is_given_back() -> None:
    engine = ByHand()
    pool = engine.state.sequences.pool
    for name, num_tokens, num_reserved in (("large", 12, 3), ("small", 8, 0)):
        request = text(name, length=12)
        engine.state.sequences.reserve(request.key, num_tokens)
        engine.submit(request)
        assert pool.num_reserved == num_reserved
        while engine.turn():
            pass
        assert engine.tokens(name) == answer_alone(request)
        assert pool.num_reserved == 0


async def test_receiving_needs_a_reservation_and_every_block(start: Any) -> None:
    engine: Engine = start()
    request = text()
    with pytest.raises(GoneError):
        await engine.receive(request)
    await engine.reserve(request.key, 11)
    assert await engine.receive(request) == ReceiveResult(first_block=0)
    block = memoryview(bytes(4 * 8))
    await engine.import_blocks(request.key, 1, block)
    for first, data in ((1, block), (3, block), (0, block[:-1]), (0, block[:0])):
        with pytest.raises(CorruptTransferError):
            await engine.import_blocks(request.key, first, data)
    with pytest.raises(CorruptTransferError, match=r"blocks \[0, 2\] never came"):
        await engine.start_decode(request.key, 5)
    await engine.release(request.key)
    with pytest.raises(GoneError):
        await engine.import_blocks(request.key, 0, block)


async def test_a_first_token_that_the_model_does_not_have_is_refused(start: Any) -> None:
    engine: Engine = start()
    request = text(length=8)
    await engine.reserve(request.key, 9)
    await engine.receive(request)
    await engine.import_blocks(request.key, 0, memoryview(bytes(2 * 32)))
    with pytest.raises(CorruptTransferError, match=f"first token is {VOCABULARY}"):
        await engine.start_decode(request.key, VOCABULARY)
    await engine.release(request.key)


@pytest.mark.parametrize(
    ("first_token", "reason"), [(5, FinishReason.STOP), (6, FinishReason.LENGTH)]
)
async def test_a_first_token_that_ends_the_answer_ends_it_on_the_decode_side_too(
    start: Any, first_token: int, reason: FinishReason
) -> None:
    engine: Engine = start(eos_token_ids=(5,))
    request = text(length=8, ignore_eos=False, max_tokens=1)
    await engine.reserve(request.key, 9)
    await engine.receive(request)
    await engine.import_blocks(request.key, 0, memoryview(bytes(2 * 32)))
    told = await events(await engine.start_decode(request.key, first_token))
    assert told == [FinishedEvent(reason, 1)]
    assert engine.stats().inflight == 0


async def test_decode_finds_a_prefix_that_it_has(start: Any) -> None:
    engine: Engine = start()
    await events(engine.submit_prefill(text("before", length=12), for_peer=False))
    request = text("after", length=12)
    await engine.reserve(request.key, 13)
    assert await engine.receive(request) == ReceiveResult(first_block=3)  # all of it
    first = answer_alone(request)[0]
    told = await events(await engine.start_decode(request.key, first))
    assert [first, *tokens(told)] == answer_alone(request)


async def test_only_what_is_held_is_adopted_and_only_once(start: Any) -> None:
    engine: Engine = start()
    assert isinstance(error(await events(engine.adopt_local(text("nobody")))), GoneError)
    await events(engine.submit_prefill(text(), for_peer=True))
    adopted = engine.adopt_local(text())
    again = engine.adopt_local(text())
    assert isinstance(error(await events(again)), GoneError)
    assert tokens(await events(adopted)) == answer_alone(text())[1:]
