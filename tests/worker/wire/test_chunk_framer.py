"""How a transfer is cut, and what goes with what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.errors import GoneError
from vlm_worker.types import FinishReason, RequestKey
from vlm_worker.wire.buffers import (
    DestinationBuffers,
    HostRegions,
    LiveRegions,
    Regions,
    address_of,
    digest,
    host_views,
)
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import (
    EXPORT_BYTES,
    HEADER,
    MAX_LARGE_BYTES,
    MAX_PAYLOAD_BYTES,
    ChunkFramer,
    Commit,
    Frame,
    FrameKind,
    FrameWriter,
    Header,
    TransferId,
    Units,
    chunk_bytes_of,
)

IDENTITY = TransferId(RequestKey("r-1", 1), "t", b"b" * 16, b"f" * 16, "pod")
ROW_BYTES = 8192


def pieces_of(num_bytes: int, exported: list[int], *, opening: bool = False) -> ChunkFramer:
    writer = FrameWriter(IDENTITY, unit_bytes=ROW_BYTES, max_bytes=MAX_LARGE_BYTES)

    def export(first: int, count: int, buffer: memoryview) -> memoryview:
        exported.append(first)
        return buffer

    return ChunkFramer(
        export,
        writer,
        unit_bytes=ROW_BYTES,
        first_unit=0,
        chunk_bytes=chunk_bytes_of(num_bytes, large=True),
        opening=writer.open("shared-memory/2", b"here") if opening else None,
    )


def header_of(frame: Frame) -> Header:
    return Header(*HEADER.unpack(frame.head[: HEADER.size]))


@given(st.integers(0, 1 << 40))
def test_a_piece_is_neither_tiny_nor_larger_than_a_frame_may_be(num_bytes: int) -> None:
    assert MAX_PAYLOAD_BYTES <= chunk_bytes_of(num_bytes, large=True) <= EXPORT_BYTES
    assert chunk_bytes_of(num_bytes, large=False) == EXPORT_BYTES


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_a_larger_transfer_has_no_smaller_pieces(one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert chunk_bytes_of(less, large=True) <= chunk_bytes_of(more, large=True)


def test_an_embedding_is_checked_while_it_is_made() -> None:
    """Its first frame is there before its last piece is exported."""
    exported: list[int] = []
    run = pieces_of(576 * ROW_BYTES, exported).run(576, Commit(576, 576))
    first = next(run)
    assert exported == [0]
    rest = list(run)
    assert len(exported) > 3
    assert all(frame.payload.nbytes <= MAX_PAYLOAD_BYTES for frame in (first, *rest))
    assert header_of(rest[-1]).flags == FrameKind.COMMIT


@pytest.mark.parametrize("is_placed", [False, True])
def test_blocks_that_are_gone_by_the_end_of_their_copy_are_in_no_frame(is_placed: bool) -> None:
    """What was sent before stays valid: a commit may follow it."""
    memory = bytearray(6 * ROW_BYTES)
    blocks = [bytes([number]) * ROW_BYTES for number in range(6)]

    def check(first: int) -> None:
        if first >= 4:
            raise GoneError("they are another's")

    def export(first: int, count: int, buffer: memoryview) -> LiveRegions:
        parts = [memoryview(block) for block in blocks[first : first + count]]
        return LiveRegions(HostRegions(parts), lambda: check(first))

    def buffer(position: int, size: int) -> memoryview | None:
        return memoryview(memory)[position : position + size] if is_placed else None

    def place(position: int, source: Regions) -> memoryview:
        [data] = host_views(source)
        assert address_of(data) == address_of(memoryview(memory)[position:])
        return memoryview(b"")

    writer = FrameWriter(
        IDENTITY,
        unit_bytes=ROW_BYTES,
        max_bytes=MAX_LARGE_BYTES,
        write_at=place if is_placed else None,
    )
    pieces = ChunkFramer(
        export, writer, unit_bytes=ROW_BYTES, first_unit=0, chunk_bytes=2 * ROW_BYTES, buffer=buffer
    )
    reader = FrameReader(
        IDENTITY,
        unit_bytes=ROW_BYTES,
        first_unit=0,
        end_unit=6,
        into=DestinationBuffers([memoryview(bytearray(6 * ROW_BYTES))], reports_progress=True),
    )
    found = 0
    for frame in pieces.run(6, Commit(6, 6)):
        header = header_of(frame)
        if not is_placed:
            assert read(reader, frame)
        data = memory if is_placed else b"".join(blocks)
        start = header.first_unit * ROW_BYTES
        payload = bytes(data[start : start + header.num_bytes])
        assert frame.head[HEADER.size :] == digest(frame.head[: HEADER.size], memoryview(payload))
        found += header.num_units
    assert (found, pieces.next_unit, pieces.is_committed) == (4, 4, False)
    assert isinstance(pieces.gone, GoneError)
    if not is_placed:
        last = writer.commit(Commit(6, 6, 7, FinishReason.STOP))
        assert read(reader, last) is None
        assert reader.commit is not None


def read(reader: FrameReader, frame: Frame) -> Units | None:
    for buffer in reader.begin(memoryview(frame.head), frame.payload.nbytes):
        buffer[:] = frame.payload
        reader.update(buffer)
    return reader.end()


@pytest.mark.parametrize("num_ready", [0, 2])
def test_an_opening_goes_once_and_first(num_ready: int) -> None:
    pieces = pieces_of(4 * ROW_BYTES, [], opening=True)
    frames = [*pieces.run(num_ready, None), *pieces.run(4, Commit(4, 4))]
    kinds = [header_of(frame).flags for frame in frames]
    assert kinds[0] == FrameKind.OPEN
    assert FrameKind.OPEN not in kinds[1:]
    assert [header_of(frame).sequence for frame in frames] == list(range(len(frames)))
