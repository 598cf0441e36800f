"""Embeddings that clients give to an engine: cached without an encoder call, as encoder results."""

from __future__ import annotations

import dataclasses
from typing import Any

from worker.engine.disk_tier import SIZE, Tier
from worker.engine.encode_helpers import encode_first, events, key, prepared_image

from vlm_worker.core.embedding_file import file_name
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemFailed, ItemReady
from vlm_worker.errors import EngineError, InvalidImageError
from vlm_worker.testing import ChecksumRunner, embed
from vlm_worker.types import NO_ROWS, PreparedImage


def given_image(number: int) -> PreparedImage:
    """What a client gives that has computed the embedding of `prepared_image(number)`."""
    image = prepared_image(number)
    rows = memoryview(embed(image).tobytes())
    return dataclasses.replace(image, patches=NO_ROWS, rows=rows)


async def test_a_given_embedding_is_ready_without_an_encoder_call(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    for name, is_hit in (("a", False), ("b", True)):
        (event,) = await events(engine.encode(key(name), [given_image(1)]))
        assert isinstance(event, ItemReady)
        assert event.cache_hit is is_hit
        rows = bytes(await engine.export_embedding(key(name), 0))
        assert rows == embed(prepared_image(1)).tobytes()
    cache = engine.stats().encoder_cache
    assert (cache.entries, cache.misses, cache.hits) == (1, 1, 1)
    assert runner.batch_sizes == []
    for name in ("a", "b"):
        await engine.cancel(key(name))
    assert engine.stats().held_embedding_bytes == 0


async def test_a_given_embedding_does_not_wait_for_images_before_it(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    image = prepared_image(2)
    first = await encode_first(engine, runner, until)
    both = engine.encode(key("both"), [image, given_image(1)])
    runner.gate.set()
    told = await events(both)
    assert [(event.item, type(event)) for event in told] == [(1, ItemReady), (0, ItemReady)]
    assert len(await events(first)) == 1
    assert runner.batch_sizes == [1, 1]
    for name in ("both", "first"):
        await engine.cancel(key(name))


async def test_wrong_rows_fail_their_item_alone(start: Any) -> None:
    engine: Engine = start()
    wrong = dataclasses.replace(given_image(1), rows=given_image(1).rows[:-8])
    told = await events(engine.encode(key("a"), [wrong, given_image(2)]))
    failed, ready = told
    assert isinstance(failed, ItemFailed)
    assert isinstance(failed.error, InvalidImageError)
    assert failed.error.item == 0
    assert isinstance(ready, ItemReady)
    assert engine.stats().encoder_cache.entries == 1
    await engine.cancel(key("a"))


async def test_a_device_that_cannot_take_an_embedding_leaves_no_entry(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    take = runner.import_embedding

    def fail(rows: memoryview, num_tokens: int) -> Any:
        raise RuntimeError("CUDA out of memory")

    runner.import_embedding = fail  # type: ignore[method-assign]
    (failed,) = await events(engine.encode(key("a"), [given_image(1)]))
    assert isinstance(failed, ItemFailed)
    assert isinstance(failed.error, EngineError)
    assert engine.stats().encoder_cache.entries == 0
    await engine.cancel(key("a"))
    runner.import_embedding = take  # type: ignore[method-assign]
    (ready,) = await events(engine.encode(key("b"), [given_image(1)]))
    assert isinstance(ready, ItemReady)
    await engine.cancel(key("b"))


async def test_the_disk_tier_stores_no_given_embedding(tier: Any) -> None:
    one: Tier = tier(embedding_cold_cache_bytes=SIZE)

    async def give(name: str) -> None:
        (event,) = await events(one.engine.encode(key(name), [given_image(1)]))
        assert isinstance(event, ItemReady)
        await one.engine.cancel(key(name))

    await give("first")
    for number in (2, 3, 4):  # the first one leaves both tiers of memory, then image 2 does
        await one.encode(prepared_image(number))
    await one.until(lambda: one.disk.writes == 1)
    assert one.files == {file_name(prepared_image(2).image_key)}
    await give("again")
    assert one.directory.num_reads == 0
    assert len(one.runner.batch_sizes) == 3
