"""Reduced images: one encoder call serves every reduction, and every failure ends with an event."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from worker.answers import kept_rows
from worker.engine.encode_helpers import encode_first, events, key, prepared_image

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemFailed, ItemReady
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    EngineError,
    InvalidImageError,
    InvalidRequestError,
)
from vlm_worker.reduction import Method, Reduction
from vlm_worker.testing import ChecksumRunner, PlacedRows, embed
from vlm_worker.types import PreparedImage

HALF, QUARTER = Reduction(Method.DIVERSE, 500), Reduction(Method.DIVERSE, 250)
ZIP = Reduction(Method.ZIP, 500)
PYRAMID = Reduction(Method.ARRCOC_PYRAMID, 500)


def reduced(number: int, reduction: Reduction | None) -> PreparedImage:
    return dataclasses.replace(prepared_image(number, num_tokens=8), reduction=reduction)


def wire(image: PreparedImage) -> bytes:
    """The bytes of the embedding that a peer fetches."""
    rows = kept_rows(image)
    return rows.to_bytes() if isinstance(rows, PlacedRows) else rows.tobytes()


async def test_one_encoder_call_serves_every_reduction(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    reductions = (HALF, QUARTER, ZIP, None, HALF)
    for name, reduction in zip("abcde", reductions, strict=True):
        image = reduced(1, reduction)
        (event,) = await events(engine.encode(key(name), [image]))
        assert isinstance(event, ItemReady)
        assert event.cache_hit == (name != "a")
        assert bytes(await engine.export_embedding(key(name), 0)) == wire(image)
        await engine.cancel(key(name))
    assert runner.batch_sizes == [1]
    assert engine.stats().num_pinned_embeddings == 0
    assert engine.stats().held_embedding_bytes == 0


async def test_an_approximate_embedding_neither_serves_others_nor_is_served_by_them(
    start: Any,
) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    other_share = Reduction(Method.ARRCOC_PYRAMID, 250)
    reductions = (PYRAMID, None, other_share, HALF, PYRAMID)
    hits = []
    for name, reduction in zip("abcde", reductions, strict=True):
        image = reduced(1, reduction)
        hits.append(await engine.pin_cached(key(name), image))
        (event,) = await events(engine.encode(key(name), [image]))
        assert isinstance(event, ItemReady)
        assert event.cache_hit == hits[-1]
        assert bytes(await engine.export_embedding(key(name), 0)) == wire(image)
        await engine.cancel(key(name))
    assert hits == [False, False, False, True, True]
    assert runner.batch_sizes == [1, 1, 1]
    assert engine.stats().num_pinned_embeddings == 0


async def test_the_tokens_that_the_encoder_computes_are_counted(start: Any) -> None:
    engine: Engine = start(ChecksumRunner())
    for name, reduction, expected in (("a", PYRAMID, 4), ("b", HALF, 4 + 8)):
        await events(engine.encode(key(name), [reduced(1, reduction)]))
        assert engine.stats().count("visual_tokens") == expected


async def test_reductions_of_an_image_in_flight_join_its_encoding(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await encode_first(engine, runner, until)
    reductions = (None, HALF, QUARTER, HALF)
    streams = [
        engine.encode(key(str(number)), [reduced(1, reduction)])
        for number, reduction in enumerate(reductions)
    ]
    runner.gate.set()
    for number, (stream, reduction) in enumerate(zip(streams, reductions, strict=True)):
        (event,) = await events(stream)
        assert isinstance(event, ItemReady)
        exported = await engine.export_embedding(key(str(number)), 0)
        assert bytes(exported) == wire(reduced(1, reduction))
    assert runner.batch_sizes == [1, 1]


async def test_an_embedding_that_cannot_tell_is_encoded_again(start: Any, until: Any) -> None:
    """A request without a reduction began the encoding, and asked the tower for no scores."""
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await encode_first(engine, runner, until)
    plain = engine.encode(key("plain"), [reduced(1, None)])
    zipped = engine.encode(key("zip"), [reduced(1, ZIP)])
    runner.faults.unranked = 1
    runner.gate.set()
    for stream in (plain, zipped):
        (event,) = await events(stream)
        assert isinstance(event, ItemReady)
    assert runner.faults.unranked == 0
    assert runner.batch_sizes == [1, 1, 1]
    assert bytes(await engine.export_embedding(key("zip"), 0)) == wire(reduced(1, ZIP))
    assert (
        bytes(await engine.export_embedding(key("plain"), 0)) == embed(reduced(1, None)).tobytes()
    )


async def test_a_known_image_needs_patches_only_if_it_must_be_encoded(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    assert not await engine.pin_cached(key("a"), reduced(1, HALF))
    await events(engine.encode(key("a"), [reduced(1, None)]))
    engine.release_embedding(key("a"), 0)
    runner.faults.unranked = 1
    assert not await engine.pin_cached(key("b"), reduced(1, ZIP))
    assert await engine.pin_cached(key("b"), reduced(1, HALF))
    bare = dataclasses.replace(reduced(1, HALF), patches=memoryview(b""))
    (event,) = await events(engine.encode(key("b"), [bare]))
    assert isinstance(event, ItemReady)
    assert event.cache_hit
    assert runner.batch_sizes == [1]
    await engine.cancel(key("b"))
    assert engine.stats().num_pinned_embeddings == 0


@pytest.mark.parametrize("end", ["cancel", "release"])
async def test_an_abandoned_image_leaves_the_queue(start: Any, until: Any, end: str) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    first = await encode_first(engine, runner, until)
    stream = engine.encode(key("a"), [reduced(1, HALF)])
    if end == "cancel":
        cancelled = asyncio.ensure_future(engine.cancel(key("a")))
        await asyncio.sleep(0)  # the engine thread gets it before the gate opens
    else:
        engine.release_embedding(key("a"), 0)
    runner.gate.set()
    if end == "cancel":
        await cancelled
        assert await events(stream) == []
    else:
        (event,) = await events(stream)
        assert isinstance(event, ItemFailed)
        assert isinstance(event.error, CancelledError)
    await events(first)
    await engine.cancel(key("first"))
    assert runner.batch_sizes == [1]
    assert engine.stats().num_pinned_embeddings == 0
    (event,) = await events(engine.encode(key("b"), [reduced(1, HALF)]))
    assert isinstance(event, ItemReady)


async def test_an_abandoned_reduction_does_not_end_the_whole_image(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await encode_first(engine, runner, until)
    plain = engine.encode(key("plain"), [reduced(1, None)])
    half = engine.encode(key("half"), [reduced(1, HALF)])
    cancelled = asyncio.ensure_future(engine.cancel(key("half")))
    await asyncio.sleep(0)  # the engine thread gets it before the gate opens
    runner.gate.set()
    await cancelled
    (event,) = await events(plain)
    assert isinstance(event, ItemReady)
    assert await events(half) == []


@pytest.mark.parametrize("cached", [False, True])
async def test_a_failed_reduction_fails_its_image_alone(start: Any, *, cached: bool) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    if cached:
        await events(engine.encode(key("a"), [reduced(1, None)]))
        engine.release_embedding(key("a"), 0)
    runner.faults.reduce_error = RuntimeError("the device is full")
    told = await events(engine.encode(key("b"), [reduced(1, HALF), reduced(2, None)]))
    assert {event.item: type(event) for event in told} == {0: ItemFailed, 1: ItemReady}
    failed = next(event for event in told if isinstance(event, ItemFailed))
    assert isinstance(failed.error, EngineError)
    engine.release_embedding(key("b"), 1)
    runner.faults.reduce_error = None
    (event,) = await events(engine.encode(key("c"), [reduced(1, HALF)]))
    assert isinstance(event, ItemReady)
    assert runner.batch_sizes.count(1) + runner.batch_sizes.count(2) == len(runner.batch_sizes)
    await engine.cancel(key("b"))
    await engine.cancel(key("c"))
    assert engine.stats().num_pinned_embeddings == 0


async def test_a_known_image_whose_reduction_fails_is_not_pinned(start: Any) -> None:
    """An error here would end the whole call; `encode` fails this image alone."""
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await events(engine.encode(key("a"), [reduced(1, None)]))
    runner.faults.reduce_error = RuntimeError("the device is full")
    assert not await engine.pin_cached(key("b"), reduced(1, HALF))
    await engine.cancel(key("a"))
    assert engine.stats().num_pinned_embeddings == 0


async def test_an_image_whose_whole_embedding_does_not_fit_is_refused(start: Any) -> None:
    """E6 bounds images by the context of a model, which a reduced one may exceed before."""
    runner = ChecksumRunner()
    num_bytes = 6 * runner.embed_layout.row_bytes
    engine: Engine = start(runner, max_image_tokens=6, embedding_cache_bytes=num_bytes)
    (event,) = await events(engine.encode(key("a"), [reduced(1, QUARTER)]))  # 8 tokens, 2 kept
    assert isinstance(event, ItemFailed)
    assert isinstance(event.error, InvalidRequestError)
    assert runner.batch_sizes == []


async def test_held_bytes_include_the_places(start: Any) -> None:
    engine: Engine = start(ChecksumRunner())
    (event,) = await events(engine.encode(key("a"), [reduced(1, HALF)]))
    assert isinstance(event, ItemReady)
    await engine.pin_cached(key("b"), reduced(1, HALF))
    assert (
        engine.stats().held_embedding_bytes
        == 2 * event.num_bytes
        == 2 * len(wire(reduced(1, HALF)))
    )


async def test_a_bad_image_fails_every_reduction(start: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.bad_images = {reduced(1, None).image_key}
    engine: Engine = start(runner)
    told = await events(engine.encode(key("a"), [reduced(1, HALF), reduced(1, QUARTER)]))
    assert [type(event) for event in told] == [ItemFailed, ItemFailed]
    assert all(isinstance(event.error, InvalidImageError) for event in told)  # type: ignore[union-attr]
    assert engine.stats().num_pinned_embeddings == 0


async def test_draining_fails_the_reductions_that_wait(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await encode_first(engine, runner, until)
    stream = engine.encode(key("a"), [reduced(1, HALF)])
    draining = asyncio.ensure_future(engine.drain())
    await asyncio.sleep(0)  # the engine thread gets it before the gate opens
    runner.gate.set()
    (event,) = await events(stream)
    assert isinstance(event, ItemFailed)
    assert isinstance(event.error, DrainingError)
    await draining


async def test_each_image_of_a_call_counts_as_one_lookup(start: Any) -> None:
    """`pin_cached` reduces the whole image; `encode` counts it. One that cannot tell is a miss."""
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    await events(engine.encode(key("a"), [reduced(1, None)]))
    assert await engine.pin_cached(key("b"), reduced(1, HALF))
    await events(engine.encode(key("b"), [reduced(1, HALF)]))
    cache = engine.stats().encoder_cache
    assert (cache.hits, cache.misses) == (1, 1)
    runner.faults.unranked = 1
    await events(engine.encode(key("c"), [reduced(1, ZIP)]))
    cache = engine.stats().encoder_cache
    assert (cache.hits, cache.misses) == (1, 2)
    await events(engine.encode(key("d"), [reduced(1, QUARTER)]))
    cache = engine.stats().encoder_cache
    assert (cache.hits, cache.misses) == (2, 2)
