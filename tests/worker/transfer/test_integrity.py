"""Thousands of transfers, damaged and clean: every damage is caught before use, nothing else is.

Each run prints its seed and what caught what.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import Counter

import pytest
from worker.seeds import drawing
from worker.transfer.damages import DAMAGES, Transfer, make_transfer

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.types import FinishReason
from vlm_worker.wire.buffers import digest
from vlm_worker.wire.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Commit,
    FrameWriter,
)


def every_damage_is_caught(count: int) -> None:
    draw = drawing()
    caught: Counter[tuple[str, str]] = Counter()
    for number in range(count):
        damage = DAMAGES[number % len(DAMAGES)]
        transfer = make_transfer(draw)
        frames = transfer.frames(draw)
        damaged = damage(frames, transfer, draw)
        assert damaged != frames, f"{damage.__name__} took no effect"
        try:
            transfer.receive(damaged, in_parts=draw.random() < 0.5)
        except CorruptTransferError as error:
            caught[damage.__name__, error.refusal.value] += 1
        except IncompatibleError:
            caught[damage.__name__, Refusal.LAYOUT.value] += 1
        else:
            raise AssertionError(f"transfer {number}: {damage.__name__} was not noticed")
    for (name, by), times in sorted(caught.items()):
        print(f"{name:14} caught by {by:9} {times:6}")
    assert caught.total() == count
    assert {name for name, _ in caught} == {damage.__name__ for damage in DAMAGES}


def no_clean_one_is_refused(count: int) -> None:
    draw = drawing()
    num_bytes = 0
    for _ in range(count):
        transfer = make_transfer(draw)
        for in_parts in (False, True):
            frames = transfer.frames(draw)
            assert transfer.receive(frames, in_parts=in_parts) == transfer.data
        num_bytes += len(transfer.data)
    print(f"{count} clean transfers, {num_bytes} bytes, no false alarm")


def test_a_thousand_damaged_transfers_are_all_caught_before_use() -> None:
    every_damage_is_caught(1_000)


def test_ten_thousand_clean_transfers_all_arrive() -> None:
    no_clean_one_is_refused(10_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ten_thousand_damaged_transfers_are_all_caught_before_use() -> None:
    every_damage_is_caught(10_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_clean_transfers_all_arrive() -> None:
    no_clean_one_is_refused(100_000)


# ---- frames that lie, with a right digest --------------------------------------------------------

_NUMBERS = (0, 1, 2, 3, 7, 255, 4096, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1)


def a_lie(draw: random.Random, transfer: Transfer, due: bytes) -> bytes:
    """A frame that was made to be believed: fields drawn, the digest right; or mere bytes."""
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.choice((0, 1, HEADER_BYTES - 1, HEADER_BYTES, 300)))
    header = list(HEADER.unpack(due[: HEADER.size]))
    for field in draw.sample((2, 3, 4, 5, 6, 6, 7, 7), draw.randint(1, 3)):
        bits = 16 if field == 2 else 32
        header[field] = draw.choice(_NUMBERS) % (1 << bits)
    payload = draw.randbytes(draw.choice((0, 1, 8, 20, transfer.unit_bytes, 2000)))
    if draw.random() < 0.5:
        header[4] = len(payload)
    if header[2] == 1:
        payload = struct.pack("<5I", *(draw.choice(_NUMBERS) for _ in range(5)))
        header[4] = len(payload)
    raw = HEADER.pack(*header)
    return raw + digest(raw, memoryview(payload)) + payload


def no_lie_is_believed(count: int) -> None:
    """Nothing but our own errors, and no more memory than one frame and one unit."""
    draw = drawing()
    ends: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for _ in range(count):
            transfer = make_transfer(draw)
            honest = transfer.frames(draw)
            reader = transfer.reader()
            frames = honest[: draw.randrange(len(honest))]
            for frame in frames:
                reader.read(frame)
            # instead of the frame that is due
            lie = a_lie(draw, transfer, honest[len(frames)])
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                units = reader.read(lie)
                ends["in place"] += 1
                if units is not None:
                    assert units.first_unit + units.num_units <= transfer.end_unit
                    assert units.data.nbytes == units.num_units * transfer.unit_bytes
            except CorruptTransferError as error:
                ends[error.refusal.value] += 1
            except IncompatibleError:
                ends["layout"] += 1
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 16_384 + len(lie) + transfer.unit_bytes, f"{peak} bytes for one frame"
    finally:
        tracemalloc.stop()
    for end, times in sorted(ends.items()):
        print(f"{end:12} {times:6}")
    assert ends.total() == count


def test_ten_thousand_frames_that_lie_are_refused_without_allocating() -> None:
    no_lie_is_believed(10_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_frames_that_lie_are_refused_without_allocating() -> None:
    no_lie_is_believed(100_000)


def test_a_frame_larger_than_any_is_refused_unread() -> None:
    transfer = make_transfer(random.Random(1))
    with pytest.raises(CorruptTransferError) as refused:
        transfer.reader().read(bytes(MAX_FRAME_BYTES + 1))
    assert refused.value.refusal is Refusal.SIZE


def test_a_commit_that_claims_an_early_end_gives_no_units_and_no_prefix() -> None:
    """With a finish reason fewer units are right, but whoever asked for them gets none to use."""
    transfer = make_transfer(random.Random(2))
    writer = FrameWriter(transfer.identity, unit_bytes=transfer.unit_bytes)
    reader = transfer.reader()
    reader.read(writer.commit(Commit(0, 8, 3, FinishReason.STOP)).to_bytes())
    assert reader.commit is not None
    assert reader.commit.finish_reason is FinishReason.STOP
