"""Frames: bytes of KV blocks or embedding rows on their way, checked before anything uses them.

    | header 112 | payload ≤ 1 MiB - 112 |     digest = XXH3-128 over the rest of header and payload
    | header 112 | payload ≤ 4 MiB |           where no gRPC message has to hold it

A transfer is a run of units (blocks or rows) of a size that both sides know: whole units to a
frame, or one large unit over several frames. While the producer itself waits, a WAIT frame shows
that it lives. The last frame is the commit: how many units and tokens there were, and the first
token. Without it nothing of the transfer may be used.

Where producer and consumer share memory, an OPEN frame goes first and says where it is. From then
on the payload of units lies there, at a place that both work out for themselves, up to 8 MiB to a
frame; header and digest travel as ever.

The digest is integrity, not authenticity: see wire/credentials.py.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import NamedTuple

import xxhash

from vlm_worker.errors import GoneError
from vlm_worker.types import FinishReason, RequestKey
from vlm_worker.wire.copying import PLAIN, Copier, Lying, cut

MAX_FRAME_BYTES = 1 << 20
VERSION = 2
MAGIC = 0x4D465254  # "TRFM"
HEADER = struct.Struct("<IHHIIIIII16s16s16s16s")
_DIGEST_BYTES = 16
HEADER_BYTES = HEADER.size + _DIGEST_BYTES
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES
MAX_LARGE_BYTES = 4 << 20
"""Of a payload that no gRPC message holds: few frames, and what is checked is yet in the cache."""
MAX_PLACED_BYTES = 8 << 20
"""Of a payload that does not travel: a picture's rows are most often one."""
PLACED_VERSION = 3
"""Of frames whose payload does not travel. Transports have it in their names: where consumer and
producer are of two versions, payloads travel, and those frames are the same in both."""
MAX_OPENING_BYTES = 4096
# units, tokens, first token, frames before this one, how the answer ended
COMMIT = struct.Struct("<IIIII")
# length of the transport's name, which follows; then what the transport itself says
_OPEN = struct.Struct("<B")
NO_TOKEN = 0xFFFFFFFF
FINISH = (None, FinishReason.STOP, FinishReason.LENGTH)


class Header(NamedTuple):
    """The fields of `HEADER`, of whose payload `num_bytes` speaks wherever it is."""

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


class Kind(enum.IntEnum):
    """What a frame is; in the header's flags."""

    UNITS = 0
    COMMIT = 1
    WAIT = 2
    OPEN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class TransferId:
    """Whose bytes these are; every frame carries it and every frame is held to it.

    `name` is the transfer's id. `pod_uid` may be None at the consumer, who then holds all frames to
    that of the first. `content` is what the bytes were made from: `core.prefix.content_of` a
    request for KV, the picture's content key for an embedding. Each side takes it from its own
    request, so that KV of other tokens, pictures or tenants is refused.
    """

    key: RequestKey
    name: str
    boot_id: bytes
    fingerprint: bytes
    pod_uid: str | None = None
    content: bytes = b""

    @property
    def transfer_hash(self) -> bytes:
        """16 bytes for the request, which of its transfers this is, and its content."""
        text = f"{self.key.request_id}\0{self.name}\0".encode()
        return _hash16(text + self.content)

    @property
    def pod_hash(self) -> bytes | None:
        """16 bytes that stand for the pod."""
        return None if self.pod_uid is None else _hash16(self.pod_uid.encode())


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transfer.

    `first_token_id` is None for embeddings. With `finish_reason`, that token ended the answer, and
    the units may be fewer than were asked for: there is nothing to continue.
    """

    num_units: int
    num_tokens: int
    first_token_id: int | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """Whole units, checked: `data` is `[num_units, unit_bytes]`; empty where they lie elsewhere."""

    first_unit: int
    num_units: int
    data: memoryview


class Frame(NamedTuple):
    """Header and digest, and what of the payload travels: a view, good until it is sent."""

    head: bytes
    payload: memoryview

    def joined(self) -> bytes:
        """The frame as one message."""
        return b"".join(self)


Runs = AsyncGenerator[Iterable[Frame]]
"""The frames of a transfer: each run is to be sent before the next one is asked for.

One that is a tuple is made already, and its units lie elsewhere: it takes no thread to send it."""

Place = Callable[[int, memoryview], memoryview]
"""`place(position, data)` puts bytes of units in front of the consumer, `position` counted from the
transfer's first; returns what of them has to travel in the frame."""


def units_per_frame(unit_bytes: int, *, most: int) -> int:
    """How many whole units fit into `most` bytes; at least 1: a large unit takes several frames."""
    return max(1, most // unit_bytes)


class FrameWriter:
    """Cuts units into frames, in order. One transfer, one writer. Without `place` all travels.

    A payload has at most `most` bytes: `MAX_PAYLOAD_BYTES` in gRPC's messages, `MAX_LARGE_BYTES`
    over a data connection, `MAX_PLACED_BYTES` where it is placed. `copier` is for units that are
    copied.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        first_unit: int = 0,
        place: Place | None = None,
        most: int = MAX_PAYLOAD_BYTES,
        copier: Copier = PLAIN,
    ) -> None:
        assert identity.pod_hash is not None
        self._most = most
        self._place = place
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
        for payload, num_units, offset in self._cut(data):
            yield self._frame(payload, num_units=num_units, offset=offset)

    def copy(self, lying: Lying, room: memoryview) -> list[Frame]:
        """As `write`, of units that are copied into `room`, of as many bytes, and digested there.

        Raises:
            GoneError: of `lying`; it is as if this had not been called.
        """
        mark = self._position, self._next_unit, self._sequence
        cuts = list(self._cut(room))
        all_parts = cut(lying.parts, (payload.nbytes for payload, _, _ in cuts))
        try:
            frames = [
                self._frame(payload, num_units=num_units, offset=offset, parts=parts)
                for (payload, num_units, offset), parts in zip(cuts, all_parts, strict=True)
            ]
            lying.check()
        except GoneError:
            self._position, self._next_unit, self._sequence = mark
            raise
        return frames

    def _cut(self, data: memoryview) -> Iterator[tuple[memoryview, int, int]]:
        """Payloads, each with the number of units in its run and where it begins there."""
        flat = data.cast("B") if data.nbytes else data
        assert flat.nbytes % self._unit_bytes == 0
        count, limit = units_per_frame(self._unit_bytes, most=self._most), self._most
        for start in range(0, flat.nbytes, count * self._unit_bytes):
            run = flat[start : start + count * self._unit_bytes]
            num_units = run.nbytes // self._unit_bytes
            for offset in range(0, run.nbytes, limit):
                yield run[offset : offset + limit], num_units, offset

    def open(self, transport: str, opening: bytes) -> Frame:
        """The first frame, where units lie in memory that both reach."""
        name = transport.encode()
        payload = _OPEN.pack(len(name)) + name + opening
        return self._frame(memoryview(payload), num_units=0, offset=0, kind=Kind.OPEN)

    def wait(self) -> Frame:
        """A frame without units: the producer lives, and has nothing yet."""
        return self._frame(memoryview(b""), num_units=0, offset=0, kind=Kind.WAIT)

    def commit(self, commit: Commit) -> Frame:
        """The last frame."""
        token = NO_TOKEN if commit.first_token_id is None else commit.first_token_id
        payload = COMMIT.pack(
            commit.num_units,
            commit.num_tokens,
            token,
            self._sequence,
            FINISH.index(commit.finish_reason),
        )
        return self._frame(memoryview(payload), num_units=0, offset=0, kind=Kind.COMMIT)

    def _frame(
        self,
        payload: memoryview,
        *,
        num_units: int,
        offset: int,
        kind: Kind = Kind.UNITS,
        parts: list[memoryview] | None = None,
    ) -> Frame:
        """Of a payload that lies there, or of parts that are copied there first."""
        header = HEADER.pack(
            MAGIC,
            VERSION,
            kind,
            self._sequence,
            payload.nbytes,
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
        if kind is Kind.UNITS and offset + payload.nbytes == num_units * self._unit_bytes:
            self._next_unit += num_units
        if parts is None:
            head = header + digest(header, payload)
        else:
            head = header + self._copier.copy(parts, [payload], head=header)
        if kind is Kind.UNITS and self._place is not None:
            travels = self._place(self._position, payload)
            self._position += payload.nbytes
            return Frame(head, travels)
        return Frame(head, payload)


def digest(header: memoryview | bytes, payload: memoryview) -> bytes:
    """XXH3-128 over both."""
    state = xxhash.xxh3_128(header)
    state.update(payload)
    found: bytes = state.digest()
    return found


def _hash16(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
