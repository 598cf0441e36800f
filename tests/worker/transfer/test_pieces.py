"""How a transfer is cut, and what goes with what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.transfer.pieces import EXPORT_BYTES, Pieces, piece_bytes_of
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import (
    HEADER,
    MAX_PAYLOAD_BYTES,
    Commit,
    Frame,
    FrameWriter,
    Header,
    Kind,
    TransferId,
)

IDENTITY = TransferId(RequestKey("r-1", 1), "t", b"b" * 16, b"f" * 16, "pod")
ROW_BYTES = 8192


def pieces_of(num_bytes: int, exported: list[int], *, opening: bool = False) -> Pieces:
    writer = FrameWriter(IDENTITY, unit_bytes=ROW_BYTES, large=True)

    def export(first: int, count: int, room: memoryview) -> memoryview:
        exported.append(first)
        return room

    return Pieces(
        export,
        writer,
        unit_bytes=ROW_BYTES,
        first_unit=0,
        piece_bytes=piece_bytes_of(num_bytes, large=True),
        room=lambda unit, size: None,
        opening=writer.open("shared-memory/2", b"here") if opening else None,
    )


def header_of(frame: Frame) -> Header:
    return Header(*HEADER.unpack(frame.head[: HEADER.size]))


@given(st.integers(0, 1 << 40))
def test_a_piece_is_neither_tiny_nor_larger_than_a_frame_may_be(num_bytes: int) -> None:
    assert MAX_PAYLOAD_BYTES <= piece_bytes_of(num_bytes, large=True) <= EXPORT_BYTES
    assert piece_bytes_of(num_bytes, large=False) == EXPORT_BYTES


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_a_larger_transfer_has_no_smaller_pieces(one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert piece_bytes_of(less, large=True) <= piece_bytes_of(more, large=True)


def test_an_embedding_is_checked_while_it_is_made() -> None:
    """Its first frame is there before its last piece is exported."""
    exported: list[int] = []
    run = pieces_of(576 * ROW_BYTES, exported).run(576, Commit(576, 576))
    first = next(run)
    assert exported == [0]
    rest = list(run)
    assert len(exported) > 3
    assert all(frame.payload.nbytes <= MAX_PAYLOAD_BYTES for frame in (first, *rest))
    assert header_of(rest[-1]).flags == Kind.COMMIT


@pytest.mark.parametrize("num_ready", [0, 2])
def test_an_opening_goes_once_and_first(num_ready: int) -> None:
    pieces = pieces_of(4 * ROW_BYTES, [], opening=True)
    frames = [*pieces.run(num_ready, None), *pieces.run(4, Commit(4, 4))]
    kinds = [header_of(frame).flags for frame in frames]
    assert kinds[0] == Kind.OPEN
    assert Kind.OPEN not in kinds[1:]
    assert [header_of(frame).sequence for frame in frames] == list(range(len(frames)))
