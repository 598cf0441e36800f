"""A disk that does not answer costs hits: no image waits long for it, and no engine's end."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from worker.engine.disk_tier import HALF, SIZE, Tier
from worker.engine.encode_helpers import events, key, prepared_image

from vlm_worker.engine import embedding_files, embedding_reads
from vlm_worker.engine.embedding_files import Directory
from vlm_worker.engine.events import ItemReady
from vlm_worker.reduction import Reduction

SOON, NEVER = 0.05, 600.0


@pytest.mark.parametrize("reduction", [None, HALF])
async def test_images_that_wait_for_a_stalled_disk_are_encoded(
    tier: Any, monkeypatch: pytest.MonkeyPatch, reduction: Reduction | None
) -> None:
    one: Tier = tier()
    await one.store(1, 2, 3)
    num_reads = one.directory.num_reads
    one.directory.gate.clear()
    monkeypatch.setattr(embedding_reads, "READ_SECONDS", SOON)
    image = dataclasses.replace(prepared_image(1), reduction=reduction)
    assert not (await one.encode(image)).cache_hit
    assert not (await one.encode(prepared_image(2))).cache_hit  # no second read begins
    assert one.directory.num_reads == num_reads + 1
    assert (one.disk.read_errors, one.disk.hits) == (2, 0)
    assert one.engine.stats().num_pinned_embeddings == 0
    monkeypatch.setattr(embedding_reads, "READ_SECONDS", NEVER)
    one.directory.gate.set()
    await one.store(4, 5)
    assert (await one.encode(prepared_image(1))).cache_hit
    assert one.disk.read_errors == 2


async def test_a_known_image_on_a_stalled_disk_is_reported_missing(
    tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Tier = tier()
    await one.store(1, 2, 3)
    one.directory.gate.clear()
    monkeypatch.setattr(embedding_reads, "READ_SECONDS", SOON)
    for number in (1, 2):
        assert not await one.engine.pin_cached(key("a"), prepared_image(number))
    await one.engine.cancel(key("a"))
    assert one.engine.stats().num_pinned_embeddings == 0
    assert one.runner.batch_sizes == [1, 1, 1]


async def test_an_image_is_encoded_if_many_wait_for_the_disk(
    tier: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_reads, "MAX_READS", 1)
    monkeypatch.setattr(embedding_reads, "READ_SECONDS", NEVER)
    one: Tier = tier(embedding_cache_bytes=3 * SIZE)
    await one.store(1, 2, 3, 4, 5, 6, resident=3)
    one.directory.gate.clear()
    streams = [one.engine.encode(key(str(n)), [prepared_image(n)]) for n in (1, 2)]
    assert not (await one.encode(prepared_image(3))).cache_hit
    one.directory.gate.set()
    for stream in streams:
        (event,) = await events(stream)
        assert isinstance(event, ItemReady)
        assert event.cache_hit
    assert one.disk.read_errors == 1


async def test_the_end_of_an_engine_does_not_wait_for_a_stalled_disk(
    tier: Any, until: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(embedding_files, "CLOSE_SECONDS", SOON)
    one: Tier = tier()
    await one.store(1, 2)
    num_reads = one.directory.num_reads
    one.directory.gate.clear()
    one.engine.encode(key("a"), [prepared_image(1)])
    await until(lambda: one.directory.num_reads == num_reads + 1)
    await one.engine.stop()
    with pytest.raises(BlockingIOError):
        Directory(tmp_path / "disk")
    one.directory.gate.set()
    await until(lambda: all(one.name != "embedding-files" for one in threading.enumerate()))
    Directory(tmp_path / "disk").close()
