"""The consumer side of frames: validates each frame against the consumer's own request.

    frame ─▶ size ─▶ header: identity, order, range ─▶ payload ─▶ digest ─▶ units, or the commit

No field of a frame is trusted or used to allocate memory. Unit size, range and identity come from
the consumer's layout and request. A frame is read as one message, or its head first and then its
payload directly into the destination.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.wire.buffers import DestinationBuffers, HostRegions, MemoryKind, Regions
from vlm_worker.wire.frames import (
    COMMIT,
    FINISH,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_LARGE_BYTES,
    MAX_OPENING_BYTES,
    MAX_OUT_OF_BAND_BYTES,
    MAX_PAYLOAD_BYTES,
    NO_TOKEN,
    VERSION,
    Commit,
    FrameKind,
    Header,
    TransferId,
    Units,
    units_per_frame,
)

NOTHING: Final = memoryview(b"")

Refuse = Callable[[Refusal, str], CorruptTransferError]


@dataclasses.dataclass(eq=False, slots=True)
class UnitAssembler:
    """Which bytes are due, and their destination; computed from the consumer's own request.

    Units `first_unit` to `end_unit` go into `into`; without it, memory is allocated for each batch.
    `refuse` makes the error for a part that is not due. `next_unit` is the first unit that is not
    complete; `num_bytes` counts complete units.
    """

    unit_bytes: int
    first_unit: int
    end_unit: int
    into: DestinationBuffers | None
    refuse: Refuse
    next_unit: int = dataclasses.field(init=False)
    num_bytes: int = 0
    _batch: memoryview | None = None
    _batch_bytes: int = 0
    _part_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.into is None or self.into.num_bytes == self.total_bytes
        self.next_unit = self.first_unit

    @property
    def reports_progress(self) -> bool:
        """Whether `add` returns units."""
        return self.into is None or self.into.reports_progress

    @property
    def is_whole(self) -> bool:
        return not self._part_bytes

    @property
    def total_bytes(self) -> int:
        return (self.end_unit - self.first_unit) * self.unit_bytes

    @property
    def position(self) -> int:
        """Offset of the next byte in the transfer."""
        return (self.next_unit - self.first_unit) * self.unit_bytes + self._part_bytes

    def check_due(self, header: Header, num_bytes: int, *, max_bytes: int) -> int:
        """Check that a payload is due; returns the bytes of the batch of units that it is part of.

        A frame has at most `max_bytes` of payload.

        Raises:
            CorruptTransferError: another part is due, or the payload is not of one batch.
        """
        first_unit, num_units, offset = header.first_unit, header.num_units, header.offset
        total = num_units * self.unit_bytes
        if first_unit != self.next_unit or offset != self._part_bytes:
            due = f"unit {self.next_unit}+{self._part_bytes} is due"
            raise self.refuse(Refusal.SEQUENCE, f"unit {first_unit}+{offset} where {due}")
        if not 0 < num_units <= self.end_unit - first_unit or not num_bytes:
            raise self.refuse(Refusal.RANGE, f"{num_units} units where {self.end_unit} is the end")
        max_units = units_per_frame(self.unit_bytes, max_bytes=max_bytes)
        if num_units > max_units or offset + num_bytes > total:
            raise self.refuse(Refusal.RANGE, "it holds more than its units")
        if self._part_bytes and self._batch_bytes != total:
            raise self.refuse(Refusal.RANGE, f"{num_units} units after a part of others")
        return total

    def parts(self, total: int, num_bytes: int) -> list[memoryview]:
        """The destination of the next bytes; the first part allocates the whole batch."""
        self._batch_bytes = total
        if self.into is not None and self.into.device is None:
            return list(self.into.parts(self.position, num_bytes))
        if self._batch is None:
            self._batch = np.empty(total, np.uint8).data
        return [self._batch[self._part_bytes : self._part_bytes + num_bytes]]

    def regions(self, total: int, num_bytes: int, *, accepts: frozenset[MemoryKind]) -> Regions:
        """As `parts`, in device memory if the transport accepts it and it is the destination."""
        if self.into is None or self.into.device is None or MemoryKind.DEVICE not in accepts:
            return HostRegions(self.parts(total, num_bytes))
        self._batch_bytes = total
        return self.into.device.slice(self.position, num_bytes)

    def put(self, total: int, payload: memoryview) -> None:
        """Copy a part to its destination; a part that is a whole batch is kept without a copy."""
        if payload.nbytes == total and self.into is None:
            self._batch, self._batch_bytes = payload, total
            return
        for part in self.parts(total, payload.nbytes):
            part[:], payload = payload[: part.nbytes], payload[part.nbytes :]

    def add(self, header: Header, num_bytes: int) -> Units | None:
        """Count a validated part; returns the units that it completes.

        Units in `into` are returned without bytes, if it reports progress, or not at all.
        """
        self._part_bytes += num_bytes
        if self._part_bytes < self._batch_bytes:
            return None
        if self.into is not None and self.into.device is not None and self._batch is not None:
            self._part_bytes = 0
            target = self.into.device.slice(self.position, self._batch_bytes)
            target.owner.write(target.ranges, self._batch)
            self._batch = None
        units = Units(header.first_unit, header.num_units, self._batch or NOTHING)
        self.num_bytes += self._batch_bytes
        self._batch, self._part_bytes = None, 0
        self.next_unit += header.num_units
        return units if self.reports_progress else None


class View(Protocol):
    """The consumer side of memory that a producer exposes. Thread-safe.

    `accepts` are the kinds of destinations; a transport stages what it does not accept.
    """

    accepts: frozenset[MemoryKind]

    def read(self, position: int, destination: Regions, *, head: bytes) -> bytes:
        """Copy bytes from `position` to the consumer's own memory.

        Returns:
            XXH3-128 of `head` and of the copy, whatever changes in the producer's memory meanwhile.

        Raises:
            CorruptTransferError: the bytes are not there.
        """

    def close(self) -> None:
        """Stop reading. Idempotent."""


Open = Callable[[str, bytes, int], View]
"""`open(transport, opening, num_bytes)`: the exposed memory of a transfer of `num_bytes`."""


class FrameReader:
    """Reads frames in order and returns whole units, then the commit. One reader per transfer.

    `identity` must match every frame. `open_memory` opens memory that the producer exposes; None
    refuses it. Bytes are in `into` before they are validated. If it reports progress, units are
    returned without bytes; if not, none are returned, and the transfer must deliver all units.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        first_unit: int,
        end_unit: int,
        open_memory: Open | None = None,
        into: DestinationBuffers | None = None,
    ) -> None:
        self._identity = identity
        self._transfer_hash = identity.transfer_hash
        self._pod_hash = identity.pod_hash
        self.assembler = UnitAssembler(unit_bytes, first_unit, end_unit, into, self._refuse)
        self._open_memory = open_memory
        self._memory: View | None = None
        self._sequence = 0
        self._head: tuple[Header, bytes] | None = None
        self._payload = NOTHING
        self._digest: Any = None
        self._fetched_digest: bytes | None = None
        self._num_received = 0
        self._in_place = False
        self._max_bytes = MAX_PAYLOAD_BYTES
        self.commit: Commit | None = None

    @property
    def may_block(self) -> bool:
        """Whether reading a frame may block, because it fetches from exposed memory."""
        return self._open_memory is not None

    def read(self, frame: bytes) -> Units | None:
        """Validate a frame; returns the units that it completes, or None.

        Raises:
            IncompatibleError: the producer has another layout.
            CorruptTransferError: any other check failed; the transfer is void.
        """
        if not HEADER_BYTES <= len(frame) <= MAX_FRAME_BYTES:
            raise CorruptTransferError(f"a frame of {len(frame)} bytes", refusal=Refusal.SIZE)
        view = memoryview(frame)
        self._begin(view[:HEADER_BYTES])
        self._digest.update(view[HEADER_BYTES:])
        return self._end(view[HEADER_BYTES:], len(frame) - HEADER_BYTES)

    def begin(self, head: memoryview, num_bytes: int) -> list[memoryview]:
        """The destination of the `num_bytes` of payload after this head; call `update` next.

        These frames may have large payloads.

        Raises:
            CorruptTransferError: no such payload is due.
        """
        self._max_bytes = MAX_LARGE_BYTES
        header = self._begin(head)
        self._in_place = header.flags == FrameKind.UNITS and self._memory is None
        max_bytes = MAX_LARGE_BYTES if self._in_place else MAX_OPENING_BYTES
        if not 0 <= num_bytes <= max_bytes:
            raise self._refuse(Refusal.SIZE, f"a payload of {num_bytes} bytes")
        self._num_received = 0
        if self._in_place:
            total = self.assembler.check_due(header, num_bytes, max_bytes=self._max_bytes)
            return self.assembler.parts(total, num_bytes)
        self._payload = memoryview(bytearray(num_bytes))
        return [self._payload]

    def update(self, part: memoryview) -> None:
        """Digest the next bytes of the payload, which are in the destination and in the cache."""
        self._digest.update(part)
        self._num_received += part.nbytes

    def end(self) -> Units | None:
        """Finish a frame; returns as `read` does."""
        payload, self._payload = self._payload, NOTHING
        return self._end(payload, self._num_received)

    def close(self) -> None:
        """Close the producer's exposed memory if it is open."""
        if self._memory is not None:
            self._memory.close()

    def _begin(self, head: memoryview) -> Header:
        header = Header(*HEADER.unpack(head[: HEADER.size]))
        self._in_place = False
        self._head = header, bytes(head[HEADER.size :])
        self._digest, self._fetched_digest = xxhash.xxh3_128(head[: HEADER.size]), None
        return header

    def _end(self, payload: memoryview, num_bytes: int) -> Units | None:
        """Validate a payload of `num_bytes`, which may be in its destination already."""
        assert self._head is not None
        header, check = self._head
        if self._memory is not None and header.flags == FrameKind.UNITS:
            num_bytes = self._fetch(header, num_bytes)
        if (self._fetched_digest or self._digest.digest()) != check:
            raise self._refuse(Refusal.DIGEST, "the digest differs")
        self._check(header, num_bytes)
        self._sequence += 1
        match FrameKind(header.flags):
            case FrameKind.UNITS:
                if not self._in_place:
                    total = self.assembler.check_due(header, num_bytes, max_bytes=self._max_bytes)
                    self.assembler.put(total, payload)
                return self.assembler.add(header, num_bytes)
            case FrameKind.COMMIT:
                self._read_commit(payload)
            case FrameKind.OPEN:
                self._open(payload)
            case FrameKind.WAIT:
                if payload.nbytes:
                    raise self._refuse(Refusal.RANGE, "a wait frame has a payload")
        return None

    def _check(self, header: Header, num_bytes: int) -> None:
        """Compare a frame with a correct digest to the expected transfer."""
        ours = self._identity
        if self._pod_hash is None:
            self._pod_hash = header.pod
        for name, value, expected, refusal in (
            ("magic", header.magic, MAGIC, Refusal.SIZE),
            ("version", header.version, VERSION, Refusal.SIZE),
            ("boot id", header.boot_id, ours.boot_id, Refusal.EPOCH),
            ("pod uid", header.pod, self._pod_hash, Refusal.EPOCH),
            ("transfer or its content", header.transfer, self._transfer_hash, Refusal.IDENTITY),
            ("attempt", header.attempt, ours.key.attempt, Refusal.IDENTITY),
            ("sequence", header.sequence, self._sequence, Refusal.SEQUENCE),
            ("length", header.num_bytes, num_bytes, Refusal.SIZE),
        ):
            if value != expected:
                raise self._refuse(refusal, f"the {name} differs")
        if header.fingerprint != ours.fingerprint:
            raise IncompatibleError(f"frame {self._sequence} has another layout than ours")
        if self.commit is not None:
            raise self._refuse(Refusal.SEQUENCE, "it follows the commit")
        if header.flags not in tuple(FrameKind):
            raise self._refuse(Refusal.SIZE, f"unknown flags {header.flags}")

    # ---- units -----------------------------------------------------------------------------------

    def _fetch(self, header: Header, num_in_frame: int) -> int:
        """Fetch the payload from exposed memory, at the offset that the consumer computes."""
        assert self._memory is not None
        if num_in_frame or header.num_bytes > MAX_OUT_OF_BAND_BYTES:
            what = f"{num_in_frame} of {header.num_bytes} bytes are in the frame"
            raise self._refuse(Refusal.MEMORY, what)
        assembler, position = self.assembler, self.assembler.position
        total = assembler.check_due(header, header.num_bytes, max_bytes=MAX_OUT_OF_BAND_BYTES)
        destination = assembler.regions(total, header.num_bytes, accepts=self._memory.accepts)
        self._fetched_digest = self._memory.read(position, destination, head=HEADER.pack(*header))
        self._in_place = True
        return header.num_bytes

    def _open(self, payload: memoryview) -> None:
        if self._open_memory is None or self._sequence != 1:
            raise self._refuse(Refusal.SEQUENCE, "shared memory was not requested")
        if not 1 <= payload.nbytes <= MAX_OPENING_BYTES:
            raise self._refuse(Refusal.SIZE, f"an opening of {payload.nbytes} bytes")
        end = 1 + payload[0]
        name, opening = bytes(payload[1:end]).decode(errors="replace"), bytes(payload[end:])
        self._memory = self._open_memory(name, opening, self.assembler.total_bytes)

    def _read_commit(self, payload: memoryview) -> None:
        if payload.nbytes != COMMIT.size:
            raise self._refuse(Refusal.COMMIT, "a commit of a wrong size")
        assembler, next_unit = self.assembler, self.assembler.next_unit
        num_units, num_tokens, token, num_frames, finish = COMMIT.unpack(payload)
        if num_frames != self._sequence - 1 or finish >= len(FINISH) or not assembler.is_whole:
            raise self._refuse(Refusal.COMMIT, "the commit does not fit the frames before it")
        reason = FINISH[finish]
        if reason is not None and not assembler.reports_progress:
            raise self._refuse(Refusal.COMMIT, f"it ends as {reason.value}, and all units are due")
        if reason is None and (num_units != assembler.end_unit or next_unit != num_units):
            what = f"committed at unit {next_unit} of {num_units}, {assembler.end_unit} are due"
            raise self._refuse(Refusal.COMMIT, what)
        first_token_id = None if token == NO_TOKEN else token
        self.commit = Commit(num_units, num_tokens, first_token_id, reason)

    def _refuse(self, refusal: Refusal, what: str) -> CorruptTransferError:
        return CorruptTransferError(f"frame {self._sequence}: {what}", refusal=refusal)
