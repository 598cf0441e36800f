"""Thousands of transfers, damaged and clean: every damage is caught before use, nothing else is.

Each run prints its seed and what caught what.
"""

from __future__ import annotations

import dataclasses
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest
from worker.seeds import drawing

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.types import FinishReason, RequestKey
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Commit,
    FrameWriter,
    TransferId,
    digest,
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What a consumer knows of a transfer, and the bytes that a producer has for it."""

    identity: TransferId
    unit_bytes: int
    first_unit: int
    end_unit: int
    data: bytes

    def frames(self, draw: random.Random) -> list[bytes]:
        """As a producer sends it: in batches of any size, with signs of life in between."""
        writer = FrameWriter(self.identity, unit_bytes=self.unit_bytes, first_unit=self.first_unit)
        frames, at = [], 0
        while at < len(self.data):
            size = self.unit_bytes * draw.randint(1, 9)
            if draw.random() < 0.2:
                frames.append(writer.wait())
            frames += writer.write(memoryview(self.data)[at : at + size])
            at += size
        return [*frames, writer.commit(Commit(self.end_unit, 4 * self.end_unit, 7))]

    def reader(self) -> FrameReader:
        """Of the consumer, who does not know the pod."""
        return FrameReader(
            dataclasses.replace(self.identity, pod_uid=None),
            unit_bytes=self.unit_bytes,
            first_unit=self.first_unit,
            end_unit=self.end_unit,
        )

    def receive(self, frames: list[bytes]) -> bytes:
        """All bytes, in a buffer that only the commit makes usable."""
        reader = self.reader()
        data = bytearray()
        for frame in frames:
            units = reader.read(frame)
            if units is not None:
                # whatever comes through before a damage is found is right, and in its place
                assert bytes(units.data) == self.data[len(data) : len(data) + units.data.nbytes]
                data += units.data
        if reader.commit is None:
            raise CorruptTransferError("it ended without its commit", refusal=Refusal.COMMIT)
        return bytes(data)


def make_transfer(draw: random.Random) -> Transfer:
    end_unit = draw.randint(2, 24)
    first_unit = draw.randint(0, end_unit - 2)
    unit_bytes = draw.choice((8, 32, 100, 512))
    identity = TransferId(
        RequestKey(f"r-{draw.randint(0, 9)}", draw.randint(1, 3)),
        f"t-{draw.randint(0, 9)}",
        draw.randbytes(16),
        b"layout-of-16-byt",
        f"pod-{draw.randint(0, 9)}",
    )
    data = draw.randbytes(unit_bytes * (end_unit - first_unit))
    return Transfer(identity, unit_bytes, first_unit, end_unit, data)


# ---- damages: (frames, transfer, draw) -> frames that differ -------------------------------------

Damage = Callable[[list[bytes], Transfer, random.Random], list[bytes]]


def flip(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """One bit, anywhere."""
    index = draw.randrange(len(frames))
    bit = draw.randrange(8 * len(frames[index]))
    damaged = bytearray(frames[index])
    damaged[bit // 8] ^= 1 << bit % 8
    return [*frames[:index], bytes(damaged), *frames[index + 1 :]]


def swap_halves(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """The halves of a payload change places."""
    index = draw.choice([i for i, f in enumerate(frames) if len(f) > HEADER_BYTES])
    head, payload = frames[index][:HEADER_BYTES], frames[index][HEADER_BYTES:]
    half = len(payload) // 2
    turned = payload[half:] + payload[:half]
    return flip(frames, _, draw) if turned == payload else _with(frames, index, head + turned)


def truncate(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """A frame ends early."""
    index = draw.randrange(len(frames))
    return _with(frames, index, frames[index][: draw.randrange(len(frames[index]))])


def cut(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """The stream ends early."""
    return frames[: draw.randrange(len(frames))]


def lose(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """A frame is missing."""
    index = draw.randrange(len(frames))
    return frames[:index] + frames[index + 1 :]


def reorder(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """Two frames change places."""
    a, b = draw.sample(range(len(frames)), 2)
    turned = list(frames)
    turned[a], turned[b] = turned[b], turned[a]
    return turned


def duplicate(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """A frame comes twice."""
    index = draw.randrange(len(frames))
    return frames[: index + 1] + frames[index:]


def replay(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """A frame, or all of them, of an earlier attempt at the same request."""
    key = dataclasses.replace(transfer.identity.key, attempt=transfer.identity.key.attempt + 1)
    return _mixed(frames, transfer, draw, key=key)


def old_epoch(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of an earlier life of the same pod."""
    return _mixed(frames, transfer, draw, boot_id=draw.randbytes(16))


def swap_requests(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of another request of the same shape."""
    return _mixed(frames, transfer, draw, key=RequestKey("another", transfer.identity.key.attempt))


def swap_items(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of another picture of the same request and size."""
    return _mixed(frames, transfer, draw, name="t-another")


def other_pod(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """One frame of another pod."""
    others = _of(transfer, draw, frames, pod_uid="another")
    index = draw.randrange(len(frames) - 1) + 1
    return _with(frames, index, others[index])


def other_layout(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of a worker of another layout."""
    return _mixed(frames, transfer, draw, fingerprint=b"another-16-bytes")


def after_the_end(frames: list[bytes], _: Transfer, draw: random.Random) -> list[bytes]:
    """Something follows the commit."""
    return [*frames, draw.choice(frames)]


DAMAGES: tuple[Damage, ...] = (
    flip, swap_halves, truncate, cut, lose, reorder, duplicate, replay, old_epoch, swap_requests,
    swap_items, other_pod, other_layout, after_the_end,
)  # fmt: skip


def _with(frames: list[bytes], index: int, frame: bytes) -> list[bytes]:
    return [*frames[:index], frame, *frames[index + 1 :]]


def _of(
    transfer: Transfer, draw: random.Random, frames: list[bytes], **identity: object
) -> list[bytes]:
    """The same frames as another would make them, well-formed; new payloads of the same sizes."""
    other = dataclasses.replace(transfer.identity, **identity)  # type: ignore[arg-type]
    made = []
    for frame in frames:
        header = list(HEADER.unpack(frame[: HEADER.size]))
        header[8] = other.key.attempt
        header[9:13] = [other.transfer_hash, other.pod_hash, other.boot_id, other.fingerprint]
        payload = frame[HEADER_BYTES:]
        if header[2] == 0:
            payload = draw.randbytes(len(payload))
        raw = HEADER.pack(*header)
        made.append(raw + digest(raw, memoryview(payload)) + payload)
    return made


def _mixed(
    frames: list[bytes], transfer: Transfer, draw: random.Random, **identity: object
) -> list[bytes]:
    others = _of(transfer, draw, frames, **identity)
    if draw.random() < 0.5:
        return others
    index = draw.randrange(len(frames))
    return _with(frames, index, others[index])


# ---- the laws ------------------------------------------------------------------------------------


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
            transfer.receive(damaged)
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
        assert transfer.receive(transfer.frames(draw)) == transfer.data
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
    reader.read(writer.commit(Commit(0, 8, 3, FinishReason.STOP)))
    assert reader.commit is not None
    assert reader.commit.finish_reason is FinishReason.STOP
