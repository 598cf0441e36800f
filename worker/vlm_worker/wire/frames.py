"""Frames: KV blocks or embedding rows in transfer, validated before use.

    | header 112 | payload ≤ 1 MiB - 112 |     digest = XXH3-128 over the rest of header and payload
    | header 112 | payload ≤ 4 MiB |           on a data connection, without a gRPC message

A transfer is a sequence of units (blocks or rows) of a size that both sides know. A frame carries
whole units, or a part of one large unit. While the producer waits for units, it sends WAIT frames
as keepalives. The last frame is the commit: number of units and tokens, and the first token. If it
is missing, no part of the transfer may be used.

If the consumer can read the producer's memory, an OPEN frame comes first and names the memory.
After it, the payload of units is out of band: both sides compute its offset there, up to 8 MiB a
frame. Header and digest stay in the frame.

Units become frames chunk by chunk, in the thread that iterates over them: a chunk is copied,
digested and sent before the next one, so it stays in the cache, and no other thread is woken. The
socket's buffer holds what a slow network has not sent yet.

The digest gives integrity, not authenticity: see wire/sockets.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import NamedTuple

from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.types import FinishReason, RequestKey
from vlm_worker.wire.buffers import (
    PLAIN,
    Copier,
    DeviceRegions,
    HostRegions,
    LiveRegions,
    Regions,
    address_of,
    allocate_buffer,
    digest,
    host_views,
    split_views,
    stage,
)

MAX_FRAME_BYTES = 1 << 20
VERSION = 2
MAGIC = 0x4D465254  # "TRFM"
HEADER = struct.Struct("<IHHIIIIII16s16s16s16s")
_DIGEST_BYTES = 16
HEADER_BYTES = HEADER.size + _DIGEST_BYTES
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES
MAX_LARGE_BYTES = 4 << 20
"""Payload of a data connection's frame: large, but still in the cache when it is digested."""
MAX_OUT_OF_BAND_BYTES = 8 << 20
"""Out-of-band payload of a frame: the rows of most images need one frame."""
OUT_OF_BAND_VERSION = 3
"""Version of frames with out-of-band payloads, part of each transport's name. If consumer and
producer have different versions, payloads are in the frames, which are the same in both."""
MAX_OPENING_BYTES = 4096
EXPORT_BYTES = 4 << 20
NUM_CHUNKS = 8
"""Chunks of a small transfer: the consumer validates one while the next is built."""
# units, tokens, first token, frames before this one, how the answer ended
COMMIT = struct.Struct("<IIIII")
# length of the transport's name, then the name and the transport's own bytes
_OPEN = struct.Struct("<B")
NO_TOKEN = 0xFFFFFFFF
FINISH = (None, FinishReason.STOP, FinishReason.LENGTH)


class Header(NamedTuple):
    """The fields of `HEADER`; `num_bytes` counts the payload, in the frame or out of band."""

    magic: int
    version: int
    flags: int
    sequence: int
    num_bytes: int
    first_unit: int
    num_units: int
    offset: int
    attempt: int
    transfer: bytes
    pod: bytes
    boot_id: bytes
    fingerprint: bytes


class FrameKind(enum.IntEnum):
    UNITS = 0
    COMMIT = 1
    WAIT = 2
    OPEN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class TransferId:
    """The identity of a transfer; every frame carries it and is checked against it.

    `name` is the transfer's id. `pod_uid` may be None at the consumer; then all frames must have
    the value of the first. `content` identifies the data: `content_of(request)` for KV, the
    image's content key for an embedding. Each side computes it from its own request, so KV of other
    tokens, images or tenants is refused.
    """

    key: RequestKey
    name: str
    boot_id: bytes
    fingerprint: bytes
    pod_uid: str | None = None
    content: bytes = b""

    @property
    def transfer_hash(self) -> bytes:
        """16 bytes: hash of request id, transfer id and content."""
        text = f"{self.key.request_id}\0{self.name}\0".encode()
        return _hash16(text + self.content)

    @property
    def pod_hash(self) -> bytes | None:
        """16 bytes: hash of the pod's uid."""
        return None if self.pod_uid is None else _hash16(self.pod_uid.encode())


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transfer.

    `first_token_id` is None for embeddings. If `finish_reason` is set, that token ended the answer,
    or without it the last delivered one; there may be fewer units than requested.
    """

    num_units: int
    num_tokens: int
    first_token_id: int | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """Whole units, validated: `data` is `[num_units, unit_bytes]`; empty if they are elsewhere."""

    first_unit: int
    num_units: int
    data: memoryview


class Frame(NamedTuple):
    """Header and digest, and the payload in the frame: a view, valid until it is sent."""

    head: bytes
    payload: memoryview

    def to_bytes(self) -> bytes:
        return b"".join(self)


FrameBatches = AsyncGenerator[Iterable[Frame]]
"""The frames of a transfer in batches: send one before asking for the next.

A tuple is prebuilt and its payloads are out of band: sending it needs no thread."""

WriteAt = Callable[[int, Regions], memoryview]
"""`write_at(position, data)` exposes bytes of units at an offset from the transfer's first unit;
returns the bytes that must be in the frame."""

Export = Callable[[int, int, memoryview], memoryview | LiveRegions]
"""`export(first_unit, num_units, buffer)` returns `[num_units, unit_bytes]`: a copy in `buffer`, of
that size; or memory that does not change; or regions that others may overwrite. Thread-safe."""


def units_per_frame(unit_bytes: int, *, max_bytes: int) -> int:
    """Whole units in `max_bytes`; at least 1: a large unit takes several frames."""
    return max(1, max_bytes // unit_bytes)


class FrameWriter:
    """Splits units into frames, in order. One writer per transfer. `write_at` None: all in frames.

    A payload has at most `max_bytes`: `MAX_PAYLOAD_BYTES` in gRPC messages, `MAX_LARGE_BYTES` on a
    data connection, `MAX_OUT_OF_BAND_BYTES` out of band. `copier` copies units in `copy`.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        first_unit: int = 0,
        write_at: WriteAt | None = None,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        copier: Copier = PLAIN,
    ) -> None:
        assert identity.pod_hash is not None
        self._max_bytes = max_bytes
        self._write_at = write_at
        self._copier = copier
        self._position = 0
        self._identity = identity
        self._pod_hash = identity.pod_hash
        self._transfer_hash = identity.transfer_hash
        self._unit_bytes = unit_bytes
        self._next_unit = first_unit
        self._sequence = 0

    def write(self, data: memoryview) -> Iterator[Frame]:
        """Frames of the next whole units; `data` is `[n, unit_bytes]`."""
        flat = data.cast("B") if data.nbytes else data
        for start, size, num_units, offset in self._cut(flat.nbytes):
            yield self._frame(flat[start : start + size], num_units=num_units, offset=offset)

    def copy(self, live: LiveRegions, destination: memoryview) -> list[Frame]:
        """As `write`, for units that are first copied to `destination`, of equal size.

        Raises:
            GoneError: from `live.check`; the writer is unchanged.
        """
        cuts = list(self._cut(destination.nbytes))
        sources = split_views(host_views(live.regions), (size for _, size, _, _ in cuts))
        frames = (
            self._frame(
                destination[start : start + size], num_units=num_units, offset=offset, parts=parts
            )
            for (start, size, num_units, offset), parts in zip(cuts, sources, strict=True)
        )
        return self._check(live, frames)

    def expose(self, live: LiveRegions) -> list[Frame]:
        """As `write`, for units in device memory that the consumer reads there: no copy.

        Raises:
            GoneError: from `live.check`; the writer is unchanged.
        """
        assert isinstance(live.regions, DeviceRegions)
        frames = (
            self._frame(live.regions.slice(start, size), num_units=num_units, offset=offset)
            for start, size, num_units, offset in self._cut(live.regions.num_bytes)
        )
        return self._check(live, frames)

    def _check(self, live: LiveRegions, frames: Iterator[Frame]) -> list[Frame]:
        state = self._position, self._next_unit, self._sequence
        try:
            built = list(frames)
            live.check()
        except GoneError:
            self._position, self._next_unit, self._sequence = state
            raise
        return built

    def _cut(self, num_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Start and size of each payload, units in its batch, and its offset there."""
        assert num_bytes % self._unit_bytes == 0
        count, limit = units_per_frame(self._unit_bytes, max_bytes=self._max_bytes), self._max_bytes
        for start in range(0, num_bytes, count * self._unit_bytes):
            batch_bytes = min(count * self._unit_bytes, num_bytes - start)
            for offset in range(0, batch_bytes, limit):
                size = min(limit, batch_bytes - offset)
                yield start + offset, size, batch_bytes // self._unit_bytes, offset

    def open(self, transport: str, opening: bytes) -> Frame:
        """The first frame if payloads are out of band."""
        name = transport.encode()
        payload = _OPEN.pack(len(name)) + name + opening
        return self._frame(memoryview(payload), num_units=0, offset=0, kind=FrameKind.OPEN)

    def wait(self) -> Frame:
        """A keepalive frame: no unit is ready."""
        return self._frame(memoryview(b""), num_units=0, offset=0, kind=FrameKind.WAIT)

    def commit(self, commit: Commit) -> Frame:
        token = NO_TOKEN if commit.first_token_id is None else commit.first_token_id
        finish = FINISH.index(commit.finish_reason)
        payload = COMMIT.pack(commit.num_units, commit.num_tokens, token, self._sequence, finish)
        return self._frame(memoryview(payload), num_units=0, offset=0, kind=FrameKind.COMMIT)

    def _frame(
        self,
        payload: memoryview | DeviceRegions,
        *,
        num_units: int,
        offset: int,
        kind: FrameKind = FrameKind.UNITS,
        parts: list[memoryview] | None = None,
    ) -> Frame:
        """The frame of a payload; `parts`, if given, are copied to it first."""
        num_bytes = payload.nbytes if isinstance(payload, memoryview) else payload.num_bytes
        header = HEADER.pack(
            MAGIC,
            VERSION,
            kind,
            self._sequence,
            num_bytes,
            self._next_unit,
            num_units,
            offset,
            self._identity.key.attempt,
            self._transfer_hash,
            self._pod_hash,
            self._identity.boot_id,
            self._identity.fingerprint,
        )
        self._sequence += 1
        if kind is FrameKind.UNITS and offset + num_bytes == num_units * self._unit_bytes:
            self._next_unit += num_units
        if isinstance(payload, DeviceRegions):
            assert self._write_at is not None
            in_frame = self._write_at(self._position, payload)
            self._position += num_bytes
            return Frame(header + payload.digest(header), in_frame)
        if parts is None:
            head = header + digest(header, payload)
        else:
            head = header + self._copier.copy(parts, [payload], head=header)
        if kind is FrameKind.UNITS and self._write_at is not None:
            in_frame = self._write_at(self._position, HostRegions([payload]))
            self._position += num_bytes
            return Frame(head, in_frame)
        return Frame(head, payload)


class ChunkFramer:
    """The units of one transfer from `first_unit` on, for one consumer.

    A chunk has as many units as fit `chunk_bytes`, at least one, and also a remainder of less than
    half of that. `buffer(position, num_bytes)` is exposed memory in which to make a chunk, or None;
    the first unit is at position 0. `opening` is the first frame, if there is one.

    Attributes:
        next_unit: the first unit that is not in a frame yet.
        gone: why the units ended early, or None.
        is_committed: the commit was returned.
        exposes_device: the consumer reads device memory directly; else it is staged.
    """

    def __init__(
        self,
        export: Export,
        writer: FrameWriter,
        *,
        unit_bytes: int,
        first_unit: int,
        chunk_bytes: int,
        buffer: Callable[[int, int], memoryview | None] | None = None,
        opening: Frame | None = None,
        exposes_device: bool = False,
    ) -> None:
        self.next_unit = first_unit
        self.gone: GoneError | None = None
        self.is_committed = False
        self.writer = writer
        self._export = export
        self._first_unit = first_unit
        self._unit_bytes = unit_bytes
        self._batch = max(1, chunk_bytes // unit_bytes)
        self._buffer = buffer
        self._opening = opening
        self.exposes_device = exposes_device
        self._own_buffer = memoryview(b"")

    def run(self, end_unit: int, commit: Commit | None) -> Iterator[Frame]:
        """The frames up to a unit, and the commit if given; each is valid until the next one."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            yield opening
        while self.next_unit < end_unit:
            try:
                frames = self._next_chunk(end_unit)
            except GoneError as error:
                self.gone = error
                return
            yield from frames
        if commit is not None:
            self.is_committed = True
            yield self.writer.commit(commit)

    def run_all(self, commit: Commit) -> tuple[Frame, ...]:
        """All frames; if they are one chunk, its buffer is not reused. Thread-safe.

        Raises:
            GoneError: the exposed memory was freed.
            Exception: an error of the export.
        """
        frames = tuple(self.run(commit.num_units, commit))
        if self.gone is not None:
            raise self.gone
        return frames

    def _next_chunk(self, end_unit: int) -> Iterable[Frame]:
        remaining, max_units = end_unit - self.next_unit, self._batch * 3 // 2
        num_units = remaining if remaining <= max_units else self._batch
        num_bytes = num_units * self._unit_bytes
        position = (self.next_unit - self._first_unit) * self._unit_bytes
        exposed = None if self._buffer is None else self._buffer(position, num_bytes)
        if exposed is None and self._own_buffer.nbytes < num_bytes:
            self._own_buffer = allocate_buffer(num_bytes)
        buffer = self._own_buffer[:num_bytes] if exposed is None else exposed
        data = self._export(self.next_unit, num_units, buffer)
        if (data.nbytes if isinstance(data, memoryview) else data.regions.num_bytes) != num_bytes:
            raise CorruptTransferError("the export has another size than the layout")
        frames = self._frames(data, buffer, is_exposed=exposed is not None)
        self.next_unit += num_units
        return frames

    def _frames(
        self, data: memoryview | LiveRegions, buffer: memoryview, *, is_exposed: bool
    ) -> Iterable[Frame]:
        if isinstance(data, memoryview):
            if not is_exposed or address_of(data) == address_of(buffer):
                return self.writer.write(data)
            data = LiveRegions(HostRegions([data.cast("B")]), lambda: None)
        if isinstance(data.regions, HostRegions):
            return self.writer.copy(data, buffer)
        if self.exposes_device:
            return self.writer.expose(data)
        stage(data.regions, buffer)
        data.check()
        return self.writer.write(buffer)


def chunk_bytes_of(num_bytes: int, *, large: bool) -> int:
    """The chunk size of a transfer: small enough that both sides work in parallel.

    Chunks near 1 MiB fit the L2 cache; smaller ones cost more calls than they save. If frames are
    not `large`, several are made of one chunk.
    """
    if not large:
        return EXPORT_BYTES
    return min(EXPORT_BYTES, max(MAX_PAYLOAD_BYTES, num_bytes // NUM_CHUNKS))


def _hash16(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


async def join_frames(batches: FrameBatches) -> AsyncGenerator[bytes]:
    """The frames of all batches, in order, one message each."""
    async with aclosing(batches):
        async for batch in batches:
            messages = (frame.to_bytes() for frame in batch)
            while (message := await asyncio.to_thread(next, messages, None)) is not None:
                yield message
