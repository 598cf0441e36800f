"""A transfer with the frames that a producer sends, and what can be done to these on their way."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from worker.wire.reading import read

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import digest
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import (
    HEADER,
    HEADER_BYTES,
    Commit,
    Frame,
    FrameWriter,
    TransferId,
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
        frames: list[Frame] = []
        at = 0
        while at < len(self.data):
            size = self.unit_bytes * draw.randint(1, 9)
            if draw.random() < 0.2:
                frames.append(writer.wait())
            frames += writer.write(memoryview(self.data)[at : at + size])
            at += size
        frames.append(writer.commit(Commit(self.end_unit, 4 * self.end_unit, 7)))
        return [frame.to_bytes() for frame in frames]

    def reader(self) -> FrameReader:
        """Of the consumer, who does not know the pod."""
        return FrameReader(
            dataclasses.replace(self.identity, pod_uid=None),
            unit_bytes=self.unit_bytes,
            first_unit=self.first_unit,
            end_unit=self.end_unit,
        )

    def receive(self, frames: list[bytes], *, in_parts: bool = False) -> bytes:
        """All bytes, in a buffer that only the commit makes usable."""
        reader = self.reader()
        data = bytearray()
        for frame in frames:
            units = read(reader, frame, in_parts=in_parts)
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
        draw.randbytes(32),
    )
    data = draw.randbytes(unit_bytes * (end_unit - first_unit))
    return Transfer(identity, unit_bytes, first_unit, end_unit, data)


Damage = Callable[[list[bytes], Transfer, random.Random], list[bytes]]
"""Frames, their transfer and what draws, to frames that differ."""


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
    """Of an earlier incarnation of the same pod."""
    return _mixed(frames, transfer, draw, boot_id=draw.randbytes(16))


def swap_requests(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of another request of the same shape."""
    return _mixed(frames, transfer, draw, key=RequestKey("another", transfer.identity.key.attempt))


def swap_items(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of another image of the same request and size."""
    return _mixed(frames, transfer, draw, name="t-another")


def other_content(frames: list[bytes], transfer: Transfer, draw: random.Random) -> list[bytes]:
    """Of the same transfer, made from other tokens, images or salt."""
    return _mixed(frames, transfer, draw, content=draw.randbytes(32))


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
    swap_items, other_content, other_pod, other_layout, after_the_end,
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
