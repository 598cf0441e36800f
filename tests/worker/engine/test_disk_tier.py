"""The disk tier: what memory evicts is read back, and every fault ends in an encoding."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from worker.engine.disk_tier import HALF, SIZE, FaultyDirectory, Tier
from worker.engine.encode_helpers import events, key, prepared_image

from vlm_worker.core.embedding_file import file_name
from vlm_worker.engine import embedding_reads
from vlm_worker.engine.embedding_files import Directory, EmbeddingFiles
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemFailed, ItemReady
from vlm_worker.errors import CancelledError, DrainingError, InvalidImageError
from vlm_worker.reduction import Method, Reduction
from vlm_worker.testing import ChecksumRunner, embed


def path_of(tmp_path: Path, number: int) -> Path:
    return tmp_path / "disk" / file_name(prepared_image(number).image_key)


async def test_an_evicted_embedding_is_read_back_with_the_same_bytes(tier: Any) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    event = await one.encode(prepared_image(1))
    assert event.cache_hit
    assert one.runner.batch_sizes == [1, 1]
    cache = one.engine.stats().encoder_cache
    assert (cache.hits, cache.misses, cache.disk.hits, cache.disk.read_errors) == (1, 2, 1, 0)
    await one.until(lambda: one.disk.writes == 2)
    assert (one.disk.entries, one.disk.write_errors, one.disk.dropped_writes) == (2, 0, 0)


async def test_an_embedding_goes_through_host_memory_to_the_disk(tier: Any) -> None:
    one: Tier = tier(embedding_cold_cache_bytes=SIZE)
    for number in (1, 2, 3):
        await one.encode(prepared_image(number))
    await one.until(lambda: one.disk.writes == 1)
    assert (await one.encode(prepared_image(1))).cache_hit
    assert (await one.encode(prepared_image(3))).cache_hit
    assert len(one.runner.batch_sizes) == 3


async def test_a_later_process_serves_the_files_and_deletes_what_it_cannot_use(
    tier: Any, tmp_path: Path
) -> None:
    one: Tier = tier()
    await one.store(1, 2, 3)
    await one.engine.stop()
    directory = tmp_path / "disk"
    bad, temporary = "0" * 64 + ".embedding", "1" * 64 + ".embedding." + "2" * 16 + ".tmp"
    target, link = tmp_path / "target", "3" * 64 + ".embedding"
    target.write_bytes(b"a file of another program")
    (directory / link).symlink_to(target)
    for name in (bad, temporary, "notes.txt"):
        (directory / name).write_bytes(b"something else")
    again: Tier = tier()
    remaining = {path.name for path in directory.iterdir()}
    assert {link, "notes.txt"} < remaining
    assert remaining.isdisjoint({bad, temporary})
    assert target.read_bytes() == b"a file of another program"
    assert (await again.encode(prepared_image(1))).cache_hit
    assert again.runner.batch_sizes == []
    assert {path.stat().st_mode & 0o777 for path in directory.glob("*.embedding")
            if not path.is_symlink()} == {0o600}  # fmt: skip


async def test_another_model_starts_with_an_empty_disk(tier: Any, tmp_path: Path) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    await one.engine.stop()
    layout = dataclasses.replace(one.runner.embed_layout, model_revision="other")
    directory = Directory(tmp_path / "disk")
    assert EmbeddingFiles(directory, layout).found == ()
    assert not path_of(tmp_path, 1).exists()
    directory.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip,
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_bad_file_is_encoded_again_and_deleted(
    tier: Any, tmp_path: Path, fault: str
) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    FAULTS[fault](path_of(tmp_path, 1))
    event = await one.encode(prepared_image(1))
    assert not event.cache_hit
    assert one.runner.batch_sizes == [1, 1, 1]
    assert one.disk.read_errors == 1
    cache = one.engine.stats().encoder_cache
    assert (cache.hits, cache.misses) == (0, 3)
    await one.store(3, 4)  # the thread has deleted the bad file, and writes image 1 anew
    assert (await one.encode(prepared_image(1))).cache_hit


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "I/O"), MemoryError()],
)
async def test_a_good_file_stays_after_an_error_of_the_system(
    tier: Any, error: OSError | MemoryError
) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    one.directory.read_error = error
    assert not (await one.encode(prepared_image(1))).cache_hit
    one.directory.read_error = None
    await one.store(3, 4)
    assert (one.disk.read_errors, one.disk.writes) == (1, 3)  # 1 once, 2 and 3
    assert (await one.encode(prepared_image(1))).cache_hit


async def test_a_file_that_became_a_link_is_not_followed(tier: Any, tmp_path: Path) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    path, target = path_of(tmp_path, 1), tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    assert not (await one.encode(prepared_image(1))).cache_hit
    assert target.exists()
    assert one.disk.read_errors == 1


async def test_a_full_disk_only_costs_hits(tier: Any, tmp_path: Path) -> None:
    one: Tier = tier()
    one.directory.write_error = OSError(errno.ENOSPC, "No space left on device")
    await one.encode(prepared_image(1))
    await one.encode(prepared_image(2))
    await one.until(lambda: one.disk.write_errors == 1)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["triptych.lock"]
    assert one.disk.bytes == 0
    assert not (await one.encode(prepared_image(1))).cache_hit
    one.directory.write_error = None
    await one.store(3, 4)
    assert (await one.encode(prepared_image(3))).cache_hit


async def test_requests_for_one_image_wait_for_one_read(tier: Any) -> None:
    one: Tier = tier(embedding_cache_bytes=3 * SIZE)
    await one.store(1, 2, 3, 4, resident=3)
    reads = one.directory.num_reads
    one.directory.gate.clear()
    streams = [one.engine.encode(key(name), [prepared_image(1)]) for name in "abc"]
    await one.until(lambda: one.directory.num_reads == reads + 1)
    one.directory.gate.set()
    for stream in streams:
        (event,) = await events(stream)
        assert isinstance(event, ItemReady)
        assert event.cache_hit
    for name in "abc":
        await one.engine.cancel(key(name))
    assert one.directory.num_reads == reads + 1
    assert one.runner.batch_sizes == [1, 1, 1, 1]
    assert one.engine.stats().num_pinned_embeddings == 0


@pytest.mark.parametrize("end", ["cancel", "release"])
async def test_an_abandoned_read_frees_everything(tier: Any, end: str) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    one.directory.gate.clear()
    stream = one.engine.encode(key("a"), [prepared_image(1)])
    await one.until(lambda: one.engine.stats().inflight == 1)
    if end == "cancel":
        await one.engine.cancel(key("a"))
        assert await events(stream) == []
    else:
        one.engine.release_embedding(key("a"), 0)
        (event,) = await events(stream)
        assert isinstance(event, ItemFailed)
        assert isinstance(event.error, CancelledError)
    one.directory.gate.set()
    assert (await one.encode(prepared_image(1))).cache_hit
    assert one.engine.stats().num_pinned_embeddings == 0


async def test_draining_fails_the_reads_that_wait(tier: Any) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    one.directory.gate.clear()
    stream = one.engine.encode(key("a"), [prepared_image(1)])
    await one.until(lambda: one.engine.stats().inflight == 1)
    assert await one.engine.drain() == 1
    (event,) = await events(stream)
    assert isinstance(event, ItemFailed)
    assert isinstance(event.error, DrainingError)
    one.directory.gate.set()


async def test_an_engine_that_stops_during_a_read_ends_all_calls(tier: Any) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    one.directory.gate.clear()
    pinning = asyncio.ensure_future(one.engine.pin_cached(key("b"), prepared_image(1)))
    await one.until(lambda: one.engine.stats().inflight == 1)
    stopping = asyncio.ensure_future(one.engine.stop())
    assert await pinning is False
    one.directory.gate.set()
    await stopping


async def test_a_known_image_is_read_before_it_is_decoded(tier: Any) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    bare = dataclasses.replace(prepared_image(1), patches=memoryview(b""))
    assert await one.engine.pin_cached(key("a"), bare)
    (event,) = await events(one.engine.encode(key("a"), [bare]))
    assert isinstance(event, ItemReady)
    assert event.cache_hit
    rows = await one.engine.export_embedding(key("a"), 0)
    assert bytes(rows) == embed(prepared_image(1)).tobytes()
    await one.engine.cancel(key("a"))
    assert one.runner.batch_sizes == [1, 1]
    cache = one.engine.stats().encoder_cache
    assert (cache.hits, cache.misses, cache.disk.hits) == (1, 2, 1)
    assert not await one.engine.pin_cached(key("b"), prepared_image(9))


async def test_a_known_image_whose_file_is_bad_is_decoded(tier: Any, tmp_path: Path) -> None:
    one: Tier = tier(embedding_cache_bytes=3 * SIZE)
    await one.store(1, 2, 3, 4, resident=3)
    flip(path_of(tmp_path, 1))
    bare = dataclasses.replace(prepared_image(1), patches=memoryview(b""))
    one.directory.gate.clear()
    pinning = asyncio.ensure_future(one.engine.pin_cached(key("b"), bare))
    await one.until(lambda: one.engine.stats().inflight == 1)
    stream = one.engine.encode(key("a"), [prepared_image(1)])  # has patches, and joins
    await one.until(lambda: one.engine.stats().inflight == 2)
    one.directory.gate.set()
    (event,) = await events(stream)
    assert isinstance(event, ItemReady)
    assert not event.cache_hit
    await pinning
    for name in "ab":
        await one.engine.cancel(key(name))
    assert one.runner.batch_sizes == [1, 1, 1, 1, 1]
    assert await one.engine.pin_cached(key("c"), bare)  # in memory now
    await one.engine.cancel(key("c"))
    assert one.engine.stats().num_pinned_embeddings == 0


async def test_a_known_image_whose_only_waiter_has_no_patches_is_reported_missing(
    tier: Any, tmp_path: Path
) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    flip(path_of(tmp_path, 1))
    assert not await one.engine.pin_cached(key("b"), prepared_image(1))
    await one.engine.cancel(key("b"))
    assert one.engine.stats().num_pinned_embeddings == 0
    assert one.runner.batch_sizes == [1, 1]


@pytest.mark.parametrize("known", [False, True])
async def test_a_reduction_is_computed_from_the_whole_image_on_the_disk(
    tier: Any, *, known: bool
) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    image = dataclasses.replace(prepared_image(1), reduction=HALF)
    if known:
        assert await one.engine.pin_cached(key("a"), image)
    assert (await one.encode(image)).cache_hit
    assert one.runner.batch_sizes == [1, 1]
    assert one.engine.stats().num_pinned_embeddings == 0
    cache = one.engine.stats().encoder_cache
    assert (cache.misses, cache.disk.hits, cache.hot.hits) == (2, 1, 0)


@pytest.mark.parametrize("can_tell", [True, False])
async def test_a_known_reduced_image_keeps_no_pin_on_the_whole_one(
    tier: Any, *, can_tell: bool
) -> None:
    one: Tier = tier(embedding_cache_bytes=3 * SIZE)
    await one.store(1, 2, 3, 4, resident=3)
    one.runner.faults.unranked = 0 if can_tell else 1
    image = dataclasses.replace(prepared_image(1), reduction=HALF)
    assert await one.engine.pin_cached(key("a"), image) == can_tell
    assert one.engine.stats().num_pinned_embeddings == can_tell
    assert (await one.encode(image)).cache_hit
    cache = one.engine.stats().encoder_cache
    assert (cache.disk.hits, cache.hot.hits) == (1, 0)
    assert one.runner.batch_sizes == [1, 1, 1, 1]


async def test_a_reduction_whose_file_is_bad_is_encoded(tier: Any, tmp_path: Path) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    flip(path_of(tmp_path, 1))
    image = dataclasses.replace(prepared_image(1), reduction=HALF)
    assert not (await one.encode(image)).cache_hit
    assert one.runner.batch_sizes == [1, 1, 1]


async def test_a_stored_embedding_that_cannot_tell_is_encoded_once(tier: Any) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    one.runner.faults.unranked = 1
    image = dataclasses.replace(prepared_image(1), reduction=Reduction(Method.ZIP, 500))
    await one.encode(image)
    assert one.runner.batch_sizes == [1, 1, 1]


async def test_a_bad_image_fails_after_a_bad_file(tier: Any, tmp_path: Path) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    flip(path_of(tmp_path, 1))
    one.runner.faults.bad_images = {prepared_image(1).image_key}
    (event,) = await events(one.engine.encode(key("a"), [prepared_image(1)]))
    assert isinstance(event, ItemFailed)
    assert isinstance(event.error, InvalidImageError)


async def test_an_expired_file_is_not_served_and_is_deleted(tier: Any, tmp_path: Path) -> None:
    now = [1e12]
    one: Tier = tier(wall_clock=lambda: now[0], embedding_disk_age_seconds=100)
    await one.store(1, 2)
    now[0] += 100
    assert not (await one.encode(prepared_image(1))).cache_hit
    await one.store(3, 4)  # writes follow deletions
    assert one.disk.expirations == 1
    assert one.disk.read_errors == 0


async def test_an_expired_file_that_cannot_be_deleted_keeps_no_thread_busy(tier: Any) -> None:
    now = [1e12]
    one: Tier = tier(wall_clock=lambda: now[0], embedding_disk_age_seconds=100)
    await one.store(1, 2)
    one.directory.remove_error = OSError(errno.EPERM, "Operation not permitted")
    for attempt in range(2):
        now[0] += 100  # more than RETRY_SECONDS
        await one.engine.cancel(key("a"))  # a turn
        await one.until(lambda attempt=attempt: one.disk.write_errors > attempt)
        for _ in range(10):
            await one.engine.cancel(key("a"))
        await one.engine.release(key("b"))
        assert one.directory.num_removes == attempt + 1
    assert one.disk.entries == 1


async def test_the_files_stay_within_their_bound(tier: Any, tmp_path: Path) -> None:
    bound = 3 * (SIZE + embedding_reads.HEAD_BYTES)
    one: Tier = tier(embedding_disk_bytes=bound)
    for number in range(8):
        await one.encode(prepared_image(number))
        await one.until(lambda number=number: one.disk.writes == number)  # what is written counts
    files = list((tmp_path / "disk").glob("*.embedding"))
    assert len(files) == 3
    assert sum(path.stat().st_size for path in files) <= one.disk.bytes <= bound
    assert one.disk.evictions == 4
    assert (await one.encode(prepared_image(6))).cache_hit
    assert not (await one.encode(prepared_image(0))).cache_hit


async def test_writes_are_dropped_while_too_many_bytes_wait(
    tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_reads, "BUFFER_BYTES", SIZE + embedding_reads.HEAD_BYTES)
    one: Tier = tier()
    one.directory.gate.clear()
    for number in range(4):  # 0 waits at the gate, 1 and 2 are dropped
        await one.encode(prepared_image(number))
    assert one.disk.dropped_writes == 2
    one.directory.gate.set()
    await one.until(lambda: one.disk.writes == 1)
    assert (await one.encode(prepared_image(0))).cache_hit


async def test_an_embedding_that_is_on_the_disk_is_not_written_again(tier: Any) -> None:
    one: Tier = tier()
    await one.store(1, 2)
    await one.encode(prepared_image(1))  # evicts 2
    await one.until(lambda: one.disk.writes == 2)
    await one.encode(prepared_image(2))
    await one.encode(prepared_image(1))
    await one.store(3, 4)
    assert one.disk.writes == 3


async def test_expired_memory_is_still_on_the_disk(tier: Any) -> None:
    now = [0.0]
    one: Tier = tier(clock=lambda: now[0], embedding_ttl_seconds=10)
    await one.encode(prepared_image(1))
    now[0] += 11
    await one.encode(prepared_image(2))
    await one.until(lambda: one.disk.writes == 1)
    assert (await one.encode(prepared_image(1))).cache_hit


async def test_embeddings_that_expire_together_are_all_written(
    tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_reads, "BUFFER_BYTES", 2 * SIZE + embedding_reads.HEAD_BYTES)
    now = [0.0]
    one: Tier = tier(clock=lambda: now[0], embedding_ttl_seconds=10, embedding_cache_bytes=4 * SIZE)
    for number in range(4):
        await one.encode(prepared_image(number))
    now[0] += 11
    await one.engine.cancel(key("a"))  # a turn
    await one.until(lambda: one.disk.writes + one.disk.dropped_writes == 4)
    assert one.disk.dropped_writes == 0
    assert one.engine.stats().encoder_cache.entries == 0


async def test_an_embedding_that_cannot_tell_is_replaced_and_not_written(tier: Any) -> None:
    one: Tier = tier(embedding_cache_bytes=4 * SIZE)
    await one.encode(prepared_image(1))
    one.runner.faults.unranked = 1
    image = dataclasses.replace(prepared_image(1), reduction=Reduction(Method.ZIP, 500))
    assert not (await one.encode(image)).cache_hit
    assert (one.disk.bytes, one.disk.writes, one.disk.dropped_writes) == (0, 0, 0)


@pytest.mark.parametrize("reduction", [None, HALF])
async def test_a_use_after_the_time_to_live_stores_the_expired_embedding(
    tier: Any, reduction: Reduction | None
) -> None:
    now = [0.0]
    one: Tier = tier(clock=lambda: now[0], embedding_ttl_seconds=10, embedding_cache_bytes=4 * SIZE)
    await one.encode(prepared_image(1))
    now[0] += 11
    image = dataclasses.replace(prepared_image(1), reduction=reduction)
    assert not (await one.encode(image)).cache_hit
    await one.until(lambda: one.disk.writes == 1)


def test_a_directory_of_another_process_is_refused(tmp_path: Path) -> None:
    first = Directory(tmp_path)
    with pytest.raises(BlockingIOError):
        Directory(tmp_path)
    first.close()
    Directory(tmp_path).close()


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    directory = FaultyDirectory(tmp_path)
    directory.write_error = OSError(errno.EIO, "Input/output error")
    parts: Sequence[bytes] = [b"abcdef"]
    with pytest.raises(OSError, match="Input/output"):
        directory.write("0" * 64 + ".embedding", parts)
    assert directory.names() == ["triptych.lock"]
    directory.close()


async def test_without_a_disk_nothing_is_stored(start: Any, until: Any) -> None:
    engine: Engine = start(ChecksumRunner(), embedding_cache_bytes=SIZE, max_image_tokens=5)
    for number in (1, 2, 1):
        (event,) = await events(engine.encode(key("a"), [prepared_image(number)]))
        assert isinstance(event, ItemReady)
        assert not event.cache_hit
        await engine.cancel(key("a"))
    disk = engine.stats().encoder_cache.disk
    assert set(dataclasses.asdict(disk).values()) == {0}
    assert all(thread.name != "embedding-files" for thread in threading.enumerate())
