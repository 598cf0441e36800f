"""Embeddings that are kept: on the device, then in host memory, within what each may take."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.encode_helpers import events, key, prepared_image
from worker.engine.talk import IMAGE, about_image, tokens

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EventStream, ItemReady, NeedItems
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.testing import ChecksumRunner, embed, plain_positions
from vlm_worker.types import PreparedImage, Request


async def test_idle_embeddings_leave_when_room_is_needed_and_pinned_ones_stay(start: Any) -> None:
    engine: Engine = start(embedding_cache_bytes=170, max_image_tokens=10)
    await events(engine.encode(key("pinned"), [prepared_image(0, num_tokens=10)]))
    for number in range(1, 4):
        await events(engine.encode(key(str(number)), [prepared_image(number, num_tokens=10)]))
        engine.release_embedding(key(str(number)), 0)
    rows = await engine.export_embedding(key("pinned"), 0)
    assert bytes(rows) == embed(prepared_image(0, num_tokens=10)).tobytes()
    assert engine.stats().encoder_cache.evictions > 0
    await engine.cancel(key("pinned"))


async def test_embeddings_that_exceed_device_memory_move_to_host_memory_and_return(
    start: Any,
) -> None:
    runner = ChecksumRunner()
    size = embed(prepared_image(0)).nbytes
    engine: Engine = start(
        runner,
        embedding_cache_bytes=2 * size,
        embedding_cold_cache_bytes=size,
        max_image_tokens=5,
    )
    for name in range(4):  # 0 goes, 1 is carried down, 2 and 3 stay
        await events(engine.encode(key(str(name)), [prepared_image(name)]))
        await engine.cancel(key(str(name)))
    (event,) = await events(engine.encode(key("again"), [prepared_image(1)]))
    assert isinstance(event, ItemReady)
    assert event.cache_hit
    assert (
        bytes(await engine.export_embedding(key("again"), 0)) == embed(prepared_image(1)).tobytes()
    )
    assert runner.batch_sizes == [1, 1, 1, 1]
    await engine.cancel(key("again"))
    stats = engine.stats().encoder_cache
    assert (stats.hits, stats.misses, stats.evictions) == (1, 4, 1)
    assert (stats.demotions, stats.promotions) == (3, 1)
    assert (stats.hot.entries, stats.cold.entries) == (2, 1)
    assert (stats.hot.bytes, stats.cold.bytes, stats.bytes) == (2 * size, size, 3 * size)
    assert (stats.hot.capacity_bytes, stats.cold.capacity_bytes) == (2 * size, size)
    assert (stats.hot.hits, stats.cold.hits) == (0, 1)


async def test_a_prompt_finds_in_host_memory_what_an_earlier_one_was_sent(start: Any) -> None:
    size = embed(IMAGE).nbytes
    engine: Engine = start(
        ChecksumRunner(num_blocks=17),
        embedding_cache_bytes=size,
        embedding_cold_cache_bytes=size,
        max_image_tokens=5,
    )
    for salt, number in ((b"a", 1), (b"b", 2), (b"c", 1)):  # no salt hits another's prefix
        image = prepared_image(number)
        request = dataclasses.replace(about_image(salt.decode()), cache_salt=salt)
        place = dataclasses.replace(request.items[0], image_key=image.image_key)
        request = dataclasses.replace(request, items=(place,))
        stream = engine.submit_prefill(request, for_peer=False)
        said = [event async for event in answered(engine, request, image, stream)]
        assert tokens(said) == answer_alone(request, [image])
        assert any(isinstance(event, NeedItems) for event in said) is (salt != b"c")
    stats = engine.stats().encoder_cache
    assert (stats.misses, stats.hits, stats.cold.hits) == (2, 1, 1)


async def answered(
    engine: Engine, request: Request, image: PreparedImage, stream: EventStream[Any]
) -> AsyncIterator[Any]:
    """A prompt's events; what it asks for is put."""
    async for event in stream:
        if isinstance(event, NeedItems):
            await engine.put_embedding(request.key, 0, memoryview(embed(image).tobytes()))
        yield event


def test_a_cache_too_small_for_the_largest_image_is_refused_at_the_start() -> None:
    settings = EngineSettings(max_model_len=64, embedding_cache_bytes=100, max_image_tokens=20)
    with pytest.raises(ValueError, match=r"20 visual tokens, 160 bytes .* is 100"):
        Engine(ChecksumRunner(), settings=settings, positions=plain_positions)
