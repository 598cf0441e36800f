"""Images: cached by content, encoded once, batched without waiting, failing one by one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from worker.engine.encode_helpers import encode_first, events, key, prepared_image

from vlm_worker.core.limits import QueueLimit
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EncodeEvent, ItemFailed, ItemReady
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    InvalidImageError,
    InvalidRequestError,
    OverloadedError,
)
from vlm_worker.testing import (
    ChecksumRunner,
    embed,
)


def errors(told: list[EncodeEvent]) -> list[type[Exception]]:
    return [type(event.error) for event in told if isinstance(event, ItemFailed)]


async def test_an_item_is_ready_with_its_times_and_its_rows(start: Any) -> None:
    engine: Engine = start()
    (event,) = await events(engine.encode(key("a"), [prepared_image(1)]))
    assert isinstance(event, ItemReady)
    assert not event.cache_hit
    assert event.queued_at <= event.started_at <= event.finished_at
    assert bytes(await engine.export_embedding(key("a"), 0)) == embed(prepared_image(1)).tobytes()
    engine.release_embedding(key("a"), 0)
    with pytest.raises(GoneError):
        await engine.export_embedding(key("a"), 0)


async def test_a_queued_image_that_is_released_fails_alone(start: Any) -> None:
    """A peer that leaves names images one by one, also those that wait for the encoder."""
    engine: Engine = start()
    stream = engine.encode(key("a"), [prepared_image(1), prepared_image(2)])
    engine.release_embedding(key("a"), 1)
    told = await events(stream)
    assert {type(event) for event in told} == {ItemReady, ItemFailed}
    assert errors(told) == [CancelledError]
    engine.release_embedding(key("a"), 1)
    engine.release_embedding(key("a"), 0)
    with pytest.raises(GoneError):
        await engine.export_embedding(key("a"), 0)
    assert engine.stats().held_embedding_bytes == 0


async def test_a_known_image_needs_no_patches(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    image = prepared_image(1)
    assert not await engine.pin_cached(key("b"), image)
    await events(engine.encode(key("a"), [image]))
    engine.release_embedding(key("a"), 0)
    longer = dataclasses.replace(image, num_tokens=image.num_tokens + 1)
    assert not await engine.pin_cached(key("b"), longer)
    assert await engine.pin_cached(key("b"), image)
    bare = dataclasses.replace(image, patches=memoryview(b""))
    (event,) = await events(engine.encode(key("b"), [bare]))
    assert isinstance(event, ItemReady)
    assert event.cache_hit
    assert bytes(await engine.export_embedding(key("b"), 0)) == embed(image).tobytes()
    assert runner.batch_sizes == [1]
    await engine.cancel(key("b"))


@pytest.mark.parametrize("end", ["cancel", "unpin_cached"])
async def test_a_cached_image_stays_until_it_is_unpinned(start: Any, end: str) -> None:
    engine: Engine = start(
        embedding_cache_bytes=embed(prepared_image(1)).nbytes, max_image_tokens=5
    )
    await events(engine.encode(key("a"), [prepared_image(1)]))
    await engine.cancel(key("a"))
    known = prepared_image(1)
    assert await engine.pin_cached(key("b"), known)
    for name in ("c", "d"):  # the cache has memory for one at a time
        await events(engine.encode(key(name), [prepared_image(2)]))
        await engine.cancel(key(name))
    assert engine.stats().num_pinned_embeddings == 1
    assert await engine.pin_cached(key("b"), known)
    if end == "cancel":
        await engine.cancel(key("b"))
    else:
        engine.unpin_cached(key("b"))
    await events(engine.encode(key("e"), [prepared_image(3)]))
    await engine.cancel(key("e"))
    assert not await engine.pin_cached(key("b"), known)
    assert engine.stats().num_pinned_embeddings == 0


async def test_a_second_request_for_an_image_hits_the_cache(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await events(engine.encode(key("a"), [prepared_image(1)]))
    (event,) = await events(engine.encode(key("b"), [prepared_image(1)]))
    assert isinstance(event, ItemReady)
    assert event.cache_hit
    assert runner.batch_sizes == [1]
    await engine.cancel(key("a"))
    await engine.cancel(key("b"))


async def test_images_of_several_requests_are_encoded_in_one_call_and_each_once(
    start: Any, until: Any
) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    first = await encode_first(engine, runner, until)
    streams = [
        engine.encode(key(str(number)), [prepared_image(1), prepared_image(2 + number)])
        for number in range(3)
    ]
    runner.gate.set()
    told = await asyncio.gather(*(events(stream) for stream in [first, *streams]))
    assert runner.batch_sizes == [1, 4]  # image 1 is there once
    assert all(isinstance(event, ItemReady) for items in told for event in items)
    for name in ("first", "0", "1", "2"):
        await engine.cancel(key(name))


async def test_the_encode_budget_splits_a_long_queue_but_never_starves_a_large_image(
    start: Any, until: Any
) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner, max_encode_tokens=10)
    first = await encode_first(engine, runner, until)
    sizes = (4, 6, 4, 50, 3)
    images = [prepared_image(number, num_tokens=size) for number, size in enumerate(sizes)]
    rest = engine.encode(key("rest"), images)
    runner.gate.set()
    await asyncio.gather(events(first), events(rest))
    assert runner.batch_sizes == [1, 2, 1, 1, 1]
    await engine.cancel(key("first"))
    await engine.cancel(key("rest"))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param("bad_images", InvalidImageError, id="the item fails by itself"),
        pytest.param("crash_images", EngineError, id="the whole call raises"),
        pytest.param("lost_images", EngineError, id="nothing comes in its place"),
    ],
)
async def test_a_failed_item_never_poisons_its_batch(
    start: Any, fault: str, error: type[Exception]
) -> None:
    runner = ChecksumRunner()
    bad = prepared_image(1)
    getattr(runner.faults, fault).add(bad.image_key)
    engine: Engine = start(runner)
    told = await events(engine.encode(key("a"), [prepared_image(0), bad, prepared_image(2)]))
    assert {event.item for event in told if isinstance(event, ItemReady)} == {0, 2}
    assert errors(told) == [error]
    with pytest.raises(GoneError):
        await engine.export_embedding(key("a"), 1)
    getattr(runner.faults, fault).clear()
    (event,) = await events(engine.encode(key("b"), [bad]))  # nothing of the failure stayed
    assert isinstance(event, ItemReady)
    await engine.cancel(key("a"))
    await engine.cancel(key("b"))


async def test_cancelling_a_queued_image_takes_it_out_of_the_queue(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    first = await encode_first(engine, runner, until)
    dropped = engine.encode(key("dropped"), [prepared_image(1)])
    shared = [engine.encode(key(name), [prepared_image(2)]) for name in ("x", "y")]
    cancelling = asyncio.gather(engine.cancel(key("dropped")), engine.cancel(key("x")))
    await asyncio.sleep(0)  # the commands are sent
    runner.gate.set()
    await cancelling
    assert await events(dropped) == []
    assert await events(shared[0]) == []
    (event,) = await events(shared[1])  # who joined still gets it
    assert isinstance(event, ItemReady)
    await events(first)
    assert runner.batch_sizes == [1, 1]
    await engine.cancel(key("first"))
    await engine.cancel(key("y"))


async def test_a_full_queue_answers_overloaded_with_a_retry_time(start: Any) -> None:
    engine: Engine = start(max_waiting_images=2)
    told = await events(engine.encode(key("a"), [prepared_image(n) for n in range(3)]))
    assert errors(told) == [OverloadedError] * 3
    assert isinstance(told[0], ItemFailed)
    assert isinstance(told[0].error, OverloadedError)
    assert told[0].error.retry_after_seconds > 0


@pytest.mark.timeout(10)
async def test_a_key_is_encoded_once_for_its_first_request(start: Any) -> None:
    engine: Engine = start()
    first, second = (engine.encode(key("a"), [prepared_image(1)]) for _ in range(2))
    assert errors(await events(second)) == [DuplicateError]
    assert [type(event) for event in await events(first)] == [ItemReady]
    assert errors(await events(engine.encode(key("a"), [prepared_image(1)]))) == [DuplicateError]
    await engine.cancel(key("a"))


async def test_a_drained_encoder_refuses(start: Any) -> None:
    engine: Engine = start()
    await engine.drain()
    assert errors(await events(engine.encode(key("a"), [prepared_image(1)]))) == [DrainingError]


async def test_no_images_end_at_once(start: Any) -> None:
    assert await events(start().encode(key("a"), [])) == []


async def test_waiting_requests_hold_no_more_embeddings_than_the_budget(start: Any) -> None:
    """512 requests whose consumers do not come: the rest is told when to come back."""
    num_bytes = embed(prepared_image(1)).nbytes
    fit = 28
    engine: Engine = start(
        embedding_cache_bytes=fit * num_bytes,
        max_image_tokens=5,
        max_waiting_images=1000,
        max_waiting_pixels=1 << 30,
    )
    streams = [engine.encode(key(str(number)), [prepared_image(number)]) for number in range(512)]
    told = [(await events(stream))[-1] for stream in streams]
    assert [type(event) for event in told[:fit]] == [ItemReady] * fit
    for event in told[fit:]:
        assert isinstance(event, ItemFailed)
        assert isinstance(event.error, OverloadedError)
        assert event.error.retry_after_seconds > 0
    stats = engine.stats()
    assert stats.held_embedding_bytes == stats.max_held_embedding_bytes == fit * num_bytes
    assert stats.encoder_cache.bytes <= fit * num_bytes
    assert stats.queue.refused[QueueLimit.EMBEDDINGS] == 512 - fit
    engine.release_embedding(key("0"), 0)
    assert isinstance(
        (await events(engine.encode(key("next"), [prepared_image(600)])))[-1], ItemReady
    )
    for number in range(1, fit):
        await engine.cancel(key(str(number)))
    await engine.cancel(key("next"))
    assert engine.stats().held_embedding_bytes == 0


async def test_one_image_held_by_many_counts_for_each_of_them(start: Any) -> None:
    """Each holder has copies made for its own consumer."""
    num_bytes = embed(prepared_image(1)).nbytes
    engine: Engine = start(embedding_cache_bytes=3 * num_bytes, max_image_tokens=5)
    told = [
        (await events(engine.encode(key(str(number)), [prepared_image(1)])))[-1]
        for number in range(4)
    ]
    assert [type(event) for event in told] == [ItemReady] * 3 + [ItemFailed]


async def test_embeddings_that_never_fit_are_no_overload(start: Any) -> None:
    num_bytes = embed(prepared_image(1)).nbytes
    engine: Engine = start(embedding_cache_bytes=3 * num_bytes, max_image_tokens=5)
    told = await events(engine.encode(key("a"), [prepared_image(number) for number in range(4)]))
    assert len(told) == 4
    for event in told:
        assert isinstance(event, ItemFailed)
        assert isinstance(event.error, InvalidRequestError)
        assert "--embedding-cache-bytes" in str(event.error)
