"""The consumer's side of frames: each is held to what we ourselves know, or the transfer is void.

    frame ─▶ size ─▶ header: whose, which, where ─▶ payload ─▶ digest ─▶ whole units, or the commit

Nothing that a frame says is believed and nothing is allocated by it: unit size, first and last unit
and identity come from our own layout and request, and a part of a unit is at most one unit. A frame
is read whole, or its head first and its payload into the memory where its units shall lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import xxhash

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.wire.frames import (
    COMMIT,
    FINISH,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_LARGE_BYTES,
    MAX_OPENING_BYTES,
    NO_TOKEN,
    VERSION,
    Commit,
    Header,
    Kind,
    TransferId,
    Units,
    max_payload,
    units_per_frame,
)


class Memory(Protocol):
    """Where a producer put the bytes of units; `transfer.transport.View`."""

    def take(self, position: int, room: memoryview) -> None:
        """Fill `room` with the bytes from a position on."""

    def close(self) -> None:
        """Read no more."""


Open = Callable[[str, bytes, int], Memory]
"""`open(transport, opening, num_bytes)`: where a transfer of so many bytes lies."""


class FrameReader:
    """Takes frames in order and gives whole units, or the commit. One transfer, one reader.

    `num_bytes` are those of whole units so far.

    Args:
        identity: what every frame must carry.
        unit_bytes: size of a unit, from our own layout.
        first_unit: where the transfer begins.
        end_unit: where it ends, from what we ourselves know of the request.
        open_memory: finds memory that the producer shares; None refuses it.
        into: memory for all units, from the first one on: that is where they are then, and none
            are given. Without it each run has memory of its own.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        first_unit: int,
        end_unit: int,
        open_memory: Open | None = None,
        into: memoryview | None = None,
    ) -> None:
        assert into is None or into.nbytes == (end_unit - first_unit) * unit_bytes
        self._identity = identity
        self._transfer_hash = identity.transfer_hash
        self._pod_hash = identity.pod_hash
        self._unit_bytes = unit_bytes
        self._first_unit = self._next_unit = first_unit
        self._end_unit = end_unit
        self._open_memory = open_memory
        self._into = into
        self._memory: Memory | None = None
        self._sequence = 0
        self._run: memoryview | None = None
        self._part_bytes = 0
        self._head: tuple[Header, bytes] | None = None
        self._room: memoryview | None = None
        self._digest: Any = None
        self._num_come = 0
        self._large = self._in_place = False
        self.commit: Commit | None = None
        self.num_bytes = 0

    def read(self, frame: bytes) -> Units | None:
        """Check a frame; returns the units that it completes, None where there are none.

        Raises:
            IncompatibleError: the producer has another layout.
            CorruptTransferError: anything else is not as it must be; the transfer is void.
        """
        if not HEADER_BYTES <= len(frame) <= MAX_FRAME_BYTES:
            raise CorruptTransferError(f"a frame of {len(frame)} bytes", refusal=Refusal.SIZE)
        view = memoryview(frame)
        self._begin(view[:HEADER_BYTES])
        self._digest.update(view[HEADER_BYTES:])
        return self._end(view[HEADER_BYTES:])

    def begin(self, head: memoryview, num_bytes: int) -> memoryview:
        """The memory for the payload of `num_bytes` that follows this head; `end` is next.

        Frames that come this way may be large.

        Raises:
            CorruptTransferError: no such payload is due.
        """
        self._large = True
        header = self._begin(head)
        self._in_place = header.flags == Kind.UNITS and self._memory is None
        most = MAX_LARGE_BYTES if self._in_place else MAX_OPENING_BYTES
        if not 0 <= num_bytes <= most:
            raise self._refuse(Refusal.SIZE, f"a payload of {num_bytes} bytes")
        if self._in_place:
            self._room = self._part(self._due(header, num_bytes), num_bytes)
        else:
            self._room = memoryview(bytearray(num_bytes))
        return self._room

    def come(self, num_bytes: int) -> None:
        """So many more bytes are where `begin` said, and in the cache: the time to check them."""
        assert self._room is not None
        self._digest.update(self._room[self._num_come : self._num_come + num_bytes])
        self._num_come += num_bytes

    def end(self) -> Units | None:
        """As `read`, of the payload that has come."""
        room, self._room, self._num_come = self._room, None, 0
        assert room is not None
        return self._end(room)

    def close(self) -> None:
        """Let go of the producer's memory, where there is any."""
        if self._memory is not None:
            self._memory.close()

    def _begin(self, head: memoryview) -> Header:
        header = Header(*HEADER.unpack(head[: HEADER.size]))
        self._in_place = False
        self._head = header, bytes(head[HEADER.size :])
        self._digest = xxhash.xxh3_128(head[: HEADER.size])
        return header

    def _end(self, travelled: memoryview) -> Units | None:
        assert self._head is not None
        header, check = self._head
        payload = travelled
        if self._memory is not None and header.flags == Kind.UNITS:
            payload = self._taken(header, travelled)
            self._digest.update(payload)
        if self._digest.digest() != check:
            raise self._refuse(Refusal.DIGEST, "the digest differs")
        self._check(header, payload.nbytes)
        self._sequence += 1
        match Kind(header.flags):
            case Kind.UNITS:
                return self._units(header, payload)
            case Kind.COMMIT:
                self._read_commit(payload)
            case Kind.OPEN:
                self._open(payload)
            case Kind.WAIT:
                if payload.nbytes:
                    raise self._refuse(Refusal.RANGE, "a wait frame has a payload")
        return None

    def _check(self, header: Header, num_bytes: int) -> None:
        """Hold a frame, whose digest is right, to the transfer that it is read for."""
        ours = self._identity
        if self._pod_hash is None:
            self._pod_hash = header.pod
        for name, found, wanted, refusal in (
            ("magic", header.magic, MAGIC, Refusal.SIZE),
            ("version", header.version, VERSION, Refusal.SIZE),
            ("boot id", header.boot_id, ours.boot_id, Refusal.EPOCH),
            ("pod uid", header.pod, self._pod_hash, Refusal.EPOCH),
            ("transfer", header.transfer, self._transfer_hash, Refusal.IDENTITY),
            ("attempt", header.attempt, ours.key.attempt, Refusal.IDENTITY),
            ("sequence", header.sequence, self._sequence, Refusal.SEQUENCE),
            ("length", header.num_bytes, num_bytes, Refusal.SIZE),
        ):
            if found != wanted:
                raise self._refuse(refusal, f"the {name} differs")
        if header.fingerprint != ours.fingerprint:
            raise IncompatibleError(f"frame {self._sequence} has another layout than ours")
        if self.commit is not None:
            raise self._refuse(Refusal.SEQUENCE, "it follows the commit")
        if header.flags not in tuple(Kind):
            raise self._refuse(Refusal.SIZE, f"unknown flags {header.flags}")

    # ---- units -----------------------------------------------------------------------------------

    def _taken(self, header: Header, travelled: memoryview) -> memoryview:
        """The payload, from shared memory; where it lies is our own reckoning."""
        assert self._memory is not None
        if travelled.nbytes or header.num_bytes > max_payload(large=True):
            what = f"{travelled.nbytes} of {header.num_bytes} bytes travelled"
            raise self._refuse(Refusal.MEMORY, what)
        position = (self._next_unit - self._first_unit) * self._unit_bytes + self._part_bytes
        room = self._part(self._due(header, header.num_bytes), header.num_bytes)
        self._memory.take(position, room)
        self._in_place = True
        return room

    def _due(self, header: Header, num_bytes: int) -> int:
        """The bytes of a run of units, part of which this payload is; all is held to our own."""
        first_unit, num_units, offset = header.first_unit, header.num_units, header.offset
        total = num_units * self._unit_bytes
        if first_unit != self._next_unit or offset != self._part_bytes:
            due = f"unit {self._next_unit}+{self._part_bytes} is due"
            raise self._refuse(Refusal.SEQUENCE, f"unit {first_unit}+{offset} where {due}")
        if not 0 < num_units <= self._end_unit - first_unit or not num_bytes:
            raise self._refuse(
                Refusal.RANGE, f"{num_units} units where {self._end_unit} is the end"
            )
        most = units_per_frame(self._unit_bytes, large=self._large or self._memory is not None)
        if num_units > most or offset + num_bytes > total:
            raise self._refuse(Refusal.RANGE, "it holds more than its units")
        if self._run is not None and self._run.nbytes != total:
            raise self._refuse(Refusal.RANGE, f"{num_units} units after a part of others")
        return total

    def _part(self, total: int, num_bytes: int) -> memoryview:
        """Where the next bytes of a run lie, whose memory is all there from its first part on."""
        if self._run is None and self._into is None:
            self._run = np.empty(total, np.uint8).data
        elif self._run is None and self._into is not None:
            start = (self._next_unit - self._first_unit) * self._unit_bytes
            self._run = self._into[start : start + total]
        assert self._run is not None
        return self._run[self._part_bytes : self._part_bytes + num_bytes]

    def _units(self, header: Header, payload: memoryview) -> Units | None:
        """The run of units, when all of it is there. The digest of this part was right."""
        if not self._in_place:
            total = self._due(header, payload.nbytes)
            if payload.nbytes == total and self._into is None:
                self._run = payload
            else:
                self._part(total, payload.nbytes)[:] = payload
        assert self._run is not None
        self._part_bytes += payload.nbytes
        if self._part_bytes < self._run.nbytes:
            return None
        units = Units(header.first_unit, header.num_units, self._run)
        self.num_bytes += self._run.nbytes
        self._run, self._part_bytes = None, 0
        self._next_unit += header.num_units
        return None if self._into is not None else units

    def _open(self, payload: memoryview) -> None:
        if self._open_memory is None or self._sequence != 1:
            raise self._refuse(Refusal.SEQUENCE, "shared memory was not asked for")
        if not 1 <= payload.nbytes <= MAX_OPENING_BYTES:
            raise self._refuse(Refusal.SIZE, f"an opening of {payload.nbytes} bytes")
        length = 1 + payload[0]
        name = bytes(payload[1:length]).decode(errors="replace")
        num_bytes = (self._end_unit - self._first_unit) * self._unit_bytes
        self._memory = self._open_memory(name, bytes(payload[length:]), num_bytes)

    def _read_commit(self, payload: memoryview) -> None:
        if payload.nbytes != COMMIT.size:
            raise self._refuse(Refusal.COMMIT, "a commit of a wrong size")
        fields: tuple[Any, ...] = COMMIT.unpack(payload)
        num_units, num_tokens, token, num_frames, finish = fields
        if num_frames != self._sequence - 1 or finish >= len(FINISH) or self._part_bytes:
            raise self._refuse(Refusal.COMMIT, "the commit does not fit the frames before it")
        reason = FINISH[finish]
        if reason is None and (num_units != self._end_unit or self._next_unit != num_units):
            raise self._refuse(
                Refusal.COMMIT,
                f"committed at unit {self._next_unit} of {num_units}, {self._end_unit} are due",
            )
        self.commit = Commit(
            num_units=num_units,
            num_tokens=num_tokens,
            first_token_id=None if token == NO_TOKEN else token,
            finish_reason=reason,
        )

    def _refuse(self, refusal: Refusal, what: str) -> CorruptTransferError:
        return CorruptTransferError(f"frame {self._sequence}: {what}", refusal=refusal)
