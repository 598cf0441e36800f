"""Frames: bytes of KV blocks or embedding rows on their way, checked before anything uses them.

    | header 112 | payload ≤ 1 MiB - 112 |     digest = XXH3-128 over the rest of header and payload

A transfer is a run of units (blocks or rows) of a size that both sides know: whole units to a
frame, or one large unit over several frames. While the producer itself waits, a WAIT frame shows
that it lives. The last frame is the commit: how many units and tokens there were, and the first
token. Without it nothing of the transfer may be used.

The digest is integrity, not authenticity: see wire/credentials.py.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
from collections.abc import Iterator

import xxhash

from vlm_worker.errors import CorruptTransferError
from vlm_worker.types import FinishReason, RequestKey

MAX_FRAME_BYTES = 1 << 20
VERSION = 1
_MAGIC = 0x4D465254  # "TRFM"
# magic, version, flags, sequence, nbytes, first_unit, num_units, offset, attempt,
# request, pod uid, boot id, fingerprint
_HEADER = struct.Struct("<IHHIIIIII16s16s16s16s")
_DIGEST_BYTES = 16
HEADER_BYTES = _HEADER.size + _DIGEST_BYTES
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES
# units, tokens, first token, frames before this one, how the answer ended
_COMMIT = struct.Struct("<IIIII")
_NO_TOKEN = 0xFFFFFFFF
_FINISH = (None, FinishReason.STOP, FinishReason.LENGTH)


class _Kind(enum.IntEnum):
    """What a frame is; in the header's flags."""

    UNITS = 0
    COMMIT = 1
    WAIT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TransferId:
    """Whose bytes these are; every frame carries it and every frame is held to it.

    `pod_uid` may be None at the consumer, who then holds all frames to that of the first.
    """

    key: RequestKey
    boot_id: bytes
    fingerprint: bytes
    pod_uid: str | None = None

    @property
    def request_hash(self) -> bytes:
        """16 bytes that stand for the request id."""
        return _hash16(self.key.request_id)

    @property
    def pod_hash(self) -> bytes | None:
        """16 bytes that stand for the pod."""
        return None if self.pod_uid is None else _hash16(self.pod_uid)


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
    """Whole units, checked: `data` is `[num_units, unit_bytes]`."""

    first_unit: int
    num_units: int
    data: memoryview


def units_per_frame(unit_bytes: int) -> int:
    """How many whole units fit into one frame; at least 1, as a large unit takes several frames."""
    return max(1, MAX_PAYLOAD_BYTES // unit_bytes)


class FrameWriter:
    """Cuts units into frames, in order. One transfer, one writer."""

    def __init__(self, identity: TransferId, *, unit_bytes: int, first_unit: int = 0) -> None:
        assert identity.pod_hash is not None
        self._identity = identity
        self._pod_hash = identity.pod_hash
        self._unit_bytes = unit_bytes
        self._next_unit = first_unit
        self._sequence = 0

    def write(self, data: memoryview) -> Iterator[bytes]:
        """Frames of the next whole units; `data` is `[n, unit_bytes]`."""
        flat = data.cast("B") if data.nbytes else data
        assert flat.nbytes % self._unit_bytes == 0
        count = units_per_frame(self._unit_bytes)
        for start in range(0, flat.nbytes, count * self._unit_bytes):
            run = flat[start : start + count * self._unit_bytes]
            num_units = run.nbytes // self._unit_bytes
            for offset in range(0, run.nbytes, MAX_PAYLOAD_BYTES):
                yield self._frame(
                    run[offset : offset + MAX_PAYLOAD_BYTES], num_units=num_units, offset=offset
                )
            self._next_unit += num_units

    def wait(self) -> bytes:
        """A frame without units: the producer lives, and has nothing yet."""
        return self._frame(memoryview(b""), num_units=0, offset=0, kind=_Kind.WAIT)

    def commit(self, commit: Commit) -> bytes:
        """The last frame."""
        token = _NO_TOKEN if commit.first_token_id is None else commit.first_token_id
        payload = _COMMIT.pack(
            commit.num_units,
            commit.num_tokens,
            token,
            self._sequence,
            _FINISH.index(commit.finish_reason),
        )
        return self._frame(memoryview(payload), num_units=0, offset=0, kind=_Kind.COMMIT)

    def _frame(
        self, payload: memoryview, *, num_units: int, offset: int, kind: _Kind = _Kind.UNITS
    ) -> bytes:
        header = _HEADER.pack(
            _MAGIC,
            VERSION,
            kind,
            self._sequence,
            payload.nbytes,
            self._next_unit,
            num_units,
            offset,
            self._identity.key.attempt,
            self._identity.request_hash,
            self._pod_hash,
            self._identity.boot_id,
            self._identity.fingerprint,
        )
        self._sequence += 1
        return b"".join((header, _digest(header, payload), payload))


class FrameReader:
    """Takes frames in order and gives whole units, or the commit. One transfer, one reader.

    Args:
        identity: what every frame must carry.
        unit_bytes: size of a unit, from our own layout.
        first_unit: where the transfer begins.
        end_unit: where it ends, from what we ourselves know of the request.
    """

    def __init__(
        self, identity: TransferId, *, unit_bytes: int, first_unit: int, end_unit: int
    ) -> None:
        self._identity = identity
        self._pod_hash = identity.pod_hash
        self._unit_bytes = unit_bytes
        self._next_unit = first_unit
        self._end_unit = end_unit
        self._sequence = 0
        self._part = bytearray()
        self.commit: Commit | None = None

    def read(self, frame: bytes) -> Units | None:
        """Check a frame; returns the units that it completes, None where there are none.

        Raises:
            CorruptTransferError: anything at all is not as it must be; the transfer is void.
        """
        if not HEADER_BYTES <= len(frame) <= MAX_FRAME_BYTES:
            raise CorruptTransferError(f"a frame of {len(frame)} bytes")
        view = memoryview(frame)
        header, digest = view[: _HEADER.size], view[_HEADER.size : HEADER_BYTES]
        payload = view[HEADER_BYTES:]
        if _digest(header, payload) != digest:
            raise CorruptTransferError(f"frame {self._sequence}: the digest differs")
        kind, first_unit, num_units, offset = self._check_header(header, payload.nbytes)
        if kind is _Kind.COMMIT:
            self._read_commit(payload)
            return None
        if kind is _Kind.WAIT:
            if payload.nbytes or num_units:
                raise CorruptTransferError("a wait frame with a payload")
            return None
        return self._take(payload, first_unit=first_unit, num_units=num_units, offset=offset)

    def _check_header(self, header: memoryview, num_bytes: int) -> tuple[_Kind, int, int, int]:
        (magic, version, flags, sequence, nbytes, first_unit, num_units, offset, attempt,
         request_hash, pod_hash, boot_id, fingerprint) = _HEADER.unpack(header)  # fmt: skip
        ours = self._identity
        if self._pod_hash is None:
            self._pod_hash = pod_hash
        for name, found, wanted in (
            ("magic", magic, _MAGIC),
            ("version", version, VERSION),
            ("request", request_hash, ours.request_hash),
            ("attempt", attempt, ours.key.attempt),
            ("boot id", boot_id, ours.boot_id),
            ("pod uid", pod_hash, self._pod_hash),
            ("fingerprint", fingerprint, ours.fingerprint),
            ("sequence", sequence, self._sequence),
            ("length", nbytes, num_bytes),
        ):
            if found != wanted:
                raise CorruptTransferError(f"frame {self._sequence}: the {name} differs")
        if self.commit is not None:
            raise CorruptTransferError(f"frame {self._sequence} follows the commit")
        if flags not in tuple(_Kind):
            raise CorruptTransferError(f"frame {self._sequence}: unknown flags {flags}")
        self._sequence += 1
        return _Kind(flags), first_unit, num_units, offset

    def _take(
        self, payload: memoryview, *, first_unit: int, num_units: int, offset: int
    ) -> Units | None:
        total = num_units * self._unit_bytes
        if first_unit != self._next_unit or offset != len(self._part):
            raise CorruptTransferError(f"unit {first_unit}+{offset} where {self._next_unit} is due")
        if not 0 < num_units <= self._end_unit - first_unit or not payload.nbytes:
            raise CorruptTransferError(f"{num_units} units where {self._end_unit} is the end")
        if num_units > units_per_frame(self._unit_bytes) or offset + payload.nbytes > total:
            raise CorruptTransferError("a frame holds more than its units")
        if offset + payload.nbytes < total:
            self._part += payload
            return None
        data = payload
        if offset:
            self._part += payload
            data, self._part = memoryview(self._part), bytearray()
        self._next_unit += num_units
        return Units(first_unit, num_units, data)

    def _read_commit(self, payload: memoryview) -> None:
        if payload.nbytes != _COMMIT.size:
            raise CorruptTransferError("a commit of a wrong size")
        num_units, num_tokens, token, num_frames, finish = _COMMIT.unpack(payload)
        if num_frames != self._sequence - 1 or finish >= len(_FINISH) or self._part:
            raise CorruptTransferError("the commit does not fit the frames before it")
        reason = _FINISH[finish]
        if reason is None and (num_units != self._end_unit or self._next_unit != num_units):
            raise CorruptTransferError(
                f"committed at unit {self._next_unit} of {num_units}, {self._end_unit} are due"
            )
        self.commit = Commit(
            num_units=num_units,
            num_tokens=num_tokens,
            first_token_id=None if token == _NO_TOKEN else token,
            finish_reason=reason,
        )


def _digest(header: memoryview | bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(header)
    state.update(payload)
    digest: bytes = state.digest()
    return digest


def _hash16(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
