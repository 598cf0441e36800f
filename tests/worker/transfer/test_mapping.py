"""Files that stay mapped: one that shrinks is an answer and no signal, and all are bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

from vlm_kernels.cpu import native
from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.transfer.mapping import Mapper, MappingCache, mapper_of
from vlm_worker.transfer.shared_memory import SharedMemory
from vlm_worker.transfer.transport import Exposure
from vlm_worker.wire.buffers import Copier, HostRegions
from vlm_worker.wire.frame_reader import View

SIZE = 50_000
CAPACITY = 4 * SIZE
NOTHING = memoryview(b"")


@pytest.fixture
def mapper() -> Mapper:
    found = mapper_of(native.path())
    if found is None:
        pytest.skip("no native library on this machine: nothing is mapped")
    return found


@pytest.fixture
def file(directory: Path) -> Iterator[int]:
    opened = os.open(directory / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(opened, SIZE)
    yield opened
    os.close(opened)


def shared(directory: Path) -> SharedMemory:
    return SharedMemory(
        directory, capacity_bytes=CAPACITY, leftover_seconds=60, native_library=native.path()
    )


def exposed(producer: SharedMemory, consumer: SharedMemory, num_bytes: int = SIZE) -> Exposure:
    found = producer.expose(consumer.invitation(), num_bytes)
    assert found is not None
    return found


def transfer(producer: SharedMemory, consumer: SharedMemory, data: bytes) -> View:
    """Through memory, and all read; the view is still open."""
    exposure = exposed(producer, consumer, len(data))
    exposure.write(0, HostRegions([memoryview(data)]))
    view = consumer.view(exposure.opening, len(data))
    assert taken(view, 0, len(data)) == data
    exposure.close()
    return view


def taken(view: View, position: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    digest = view.read(position, HostRegions([memoryview(buffer)]), head=b"head")
    assert digest == xxhash.xxh3_128_digest(b"head" + buffer)
    return bytes(buffer)


def segment(directory: Path) -> Path:
    [found] = [f for f in directory.iterdir() if f.name != "triptych-domain"]
    return found


def num_mapped(directory: Path) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{directory}/" in line for line in maps)


def test_what_is_written_is_read_and_nothing_beyond_the_end(mapper: Mapper, file: int) -> None:
    ours = mapper.map(file, SIZE, is_written=True)
    theirs = mapper.map(file, SIZE, is_written=False)
    ours.bytes[40_000:] = 7
    assert theirs.bytes[39_999:].tobytes() == b"\0" + b"\7" * 10_000
    with pytest.raises(ValueError, match="read-only"):
        theirs.bytes[0] = 1


def test_a_mapping_stays_while_anything_that_was_made_of_it_is_used(
    mapper: Mapper, file: int, directory: Path
) -> None:
    mapping = mapper.map(file, SIZE, is_written=True)
    buffer = mapping.bytes.data[100:200]
    del mapping
    assert num_mapped(directory) == 1
    buffer[:] = b"x" * 100
    assert os.pread(file, 100, 100) == b"x" * 100
    del buffer
    assert num_mapped(directory) == 0


def test_a_mapping_that_lost_a_page_is_void_for_good(mapper: Mapper, file: int) -> None:
    library = native.path()
    assert library is not None
    copier, buffer = Copier(library), memoryview(bytearray(SIZE))
    mapping = mapper.map(file, SIZE, is_written=False)
    os.ftruncate(file, 5000)
    copier.copy([mapping.bytes.data[:5000]], [buffer[:5000]], head=b"")
    assert mapping.is_whole
    copier.copy([mapping.bytes.data], [buffer], head=b"")
    assert not mapping.is_whole
    os.ftruncate(file, SIZE)
    copier.copy([mapping.bytes.data], [buffer], head=b"")
    assert not mapping.is_whole
    again = mapper.map(file, SIZE, is_written=False)
    copier.copy([again.bytes.data], [buffer], head=b"")
    assert again.is_whole


def test_what_cannot_be_mapped_says_why(mapper: Mapper) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapper.map(-1, SIZE, is_written=False)


def test_a_kept_file_that_shrinks_under_its_reader_or_writer_ends_one_transfer(
    mapper: Mapper, directory: Path
) -> None:
    producer, consumer = shared(directory), shared(directory)
    for _ in range(2):
        transfer(producer, consumer, b"a" * SIZE).close()
    exposure = exposed(producer, consumer)
    view = consumer.view(exposure.opening, SIZE)
    assert num_mapped(directory) == 2, "both sides have kept it"
    os.truncate(segment(directory), 100)
    with pytest.raises(CorruptTransferError, match="ends before"):
        taken(view, 10_000, 10_000)
    with pytest.raises(GoneError, match="no page"):
        exposure.write(10_000, HostRegions([memoryview(b"b" * 10_000)]))
    view.close()
    exposure.close()
    assert num_mapped(directory) == 0, "neither is used again"
    transfer(producer, consumer, b"c" * SIZE).close()
    producer.close()
    consumer.close()


def test_what_is_made_in_its_room_is_read_by_the_consumer(mapper: Mapper, directory: Path) -> None:
    producer, consumer = shared(directory), shared(directory)
    assert exposed(producer, consumer, 100).buffer(0, 10) is None, "a new file has no pages yet"
    transfer(producer, consumer, b"a" * SIZE).close()
    exposure = exposed(producer, consumer)
    buffer = exposure.buffer(10_000, 10_000)
    assert buffer is not None
    buffer[:] = b"b" * 10_000
    assert exposure.write(10_000, HostRegions([buffer])) == NOTHING
    view = consumer.view(exposure.opening, SIZE)
    assert taken(view, 9_999, 10_001) == b"a" + b"b" * 10_000
    view.close()
    producer.close()
    consumer.close()


def test_a_room_that_is_still_written_to_never_reaches_another_transfer(
    mapper: Mapper, directory: Path
) -> None:
    producer, consumer = shared(directory), shared(directory)
    transfer(producer, consumer, b"a" * SIZE).close()
    given_up = exposed(producer, consumer)
    buffer = given_up.buffer(0, SIZE)
    assert buffer is not None
    np.frombuffer(buffer, np.uint8)[:] = 1
    given_up.close()
    assert given_up.buffer(0, SIZE) is None
    transfer(producer, consumer, b"b" * SIZE).close()
    exposure = exposed(producer, consumer)
    view = consumer.view(exposure.opening, SIZE)
    buffer[:] = b"x" * SIZE
    assert taken(view, 0, SIZE) == b"b" * SIZE
    view.close()
    exposure.close()
    producer.close()
    consumer.close()
    del buffer
    assert num_mapped(directory) == 0


def test_each_side_maps_a_file_once_and_in_the_end_not_at_all(
    mapper: Mapper, directory: Path
) -> None:
    producer, consumer = shared(directory), shared(directory)
    for number in range(5):
        transfer(producer, consumer, bytes([number]) * (SIZE - number)).close()
        assert num_mapped(directory) == (2 if number else 1)
    late = transfer(producer, consumer, b"z" * SIZE)
    producer.close()
    consumer.close()
    late.close()
    assert num_mapped(directory) == 0


def test_what_a_producer_removes_has_no_pages_though_a_consumer_has_it_mapped(
    mapper: Mapper, directory: Path
) -> None:
    producer, consumer = shared(directory), shared(directory)
    transfer(producer, consumer, b"a" * SIZE).close()
    watched = os.open(segment(directory), os.O_RDONLY)
    producer.close()
    assert os.fstat(watched).st_blocks == 0
    os.close(watched)
    other = shared(directory)
    transfer(other, consumer, b"b" * SIZE).close()
    assert num_mapped(directory) == 1, "the removed one was dropped"
    other.close()
    consumer.close()


def test_mappings_that_are_kept_are_within_the_capacity(mapper: Mapper, directory: Path) -> None:
    kept = MappingCache(CAPACITY)
    for number in range(10):
        file = os.open(directory / str(number), os.O_CREAT | os.O_RDWR)
        os.ftruncate(file, SIZE)
        kept.keep(file, mapper.map(file, SIZE, is_written=False))
        assert kept.num_bytes == min(CAPACITY, (number + 1) * SIZE)
    newest = os.open(directory / "9", os.O_RDONLY)
    assert kept.take(newest, SIZE + 1) is None, "too small"
    os.close(newest)
    kept.close()
    assert (kept.num_bytes, num_mapped(directory)) == (0, 0)


def test_threads_may_take_and_keep_at_once(mapper: Mapper, directory: Path) -> None:
    names = [directory / str(number) for number in range(4)]
    for name in names:
        name.write_bytes(bytes(SIZE))
    kept = MappingCache(2 * SIZE)

    def use(name: Path) -> None:
        for _ in range(200):
            file = os.open(name, os.O_RDONLY)
            mapping = kept.take(file, SIZE) or mapper.map(file, SIZE, is_written=False)
            assert len(mapping.bytes.tobytes()) == SIZE
            assert mapping.is_whole
            kept.keep(file, mapping)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, 2 * names))
    assert kept.num_bytes <= 2 * SIZE
    kept.close()
    assert num_mapped(directory) == 0


def test_without_the_native_library_bytes_are_read_and_written_and_that_is_said(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    both = SharedMemory(directory, capacity_bytes=CAPACITY, leftover_seconds=60)
    assert ["read and written" in message for message in caplog.messages] == [True]
    for _ in range(3):
        transfer(both, both, b"a" * SIZE).close()
    assert num_mapped(directory) == 0
    both.close()
