"""The consumer's side of frames: each is held to what we ourselves know, or the transfer is void.

    frame ─▶ size ─▶ header: whose, which, where ─▶ payload ─▶ digest ─▶ whole units, or the commit

Nothing that a frame says is believed and nothing is allocated by it: unit size, first and last unit
and identity come from our own layout and request, and a part of a unit is at most one unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.wire.frames import (
    COMMIT,
    FINISH,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_OPENING_BYTES,
    NO_TOKEN,
    VERSION,
    Commit,
    Kind,
    TransferId,
    Units,
    digest,
    max_payload,
    units_per_frame,
)


class Memory(Protocol):
    """Where a producer put the bytes of units; `transfer.transport.View`."""

    def take(self, position: int, num_bytes: int, travelled: memoryview) -> memoryview:
        """Bytes at a position; `travelled` is what came in the frame."""

    def close(self) -> None:
        """Read no more."""


Open = Callable[[str, bytes, int], Memory]
"""`open(transport, opening, num_bytes)`: where a transfer of so many bytes lies."""


class _Header(NamedTuple):
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


class FrameReader:
    """Takes frames in order and gives whole units, or the commit. One transfer, one reader.

    Args:
        identity: what every frame must carry.
        unit_bytes: size of a unit, from our own layout.
        first_unit: where the transfer begins.
        end_unit: where it ends, from what we ourselves know of the request.
        open_memory: finds memory that the producer shares; None refuses it.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        first_unit: int,
        end_unit: int,
        open_memory: Open | None = None,
    ) -> None:
        self._identity = identity
        self._transfer_hash = identity.transfer_hash
        self._pod_hash = identity.pod_hash
        self._unit_bytes = unit_bytes
        self._first_unit = self._next_unit = first_unit
        self._end_unit = end_unit
        self._open_memory = open_memory
        self._memory: Memory | None = None
        self._sequence = 0
        self._part: memoryview | None = None
        self._part_bytes = 0
        self.commit: Commit | None = None

    def read(self, frame: bytes) -> Units | None:
        """Check a frame; returns the units that it completes, None where there are none.

        Raises:
            IncompatibleError: the producer has another layout.
            CorruptTransferError: anything else is not as it must be; the transfer is void.
        """
        if not HEADER_BYTES <= len(frame) <= MAX_FRAME_BYTES:
            raise CorruptTransferError(f"a frame of {len(frame)} bytes", refusal=Refusal.SIZE)
        view = memoryview(frame)
        raw, check, travelled = (
            view[: HEADER.size],
            view[HEADER.size : HEADER_BYTES],
            view[HEADER_BYTES:],
        )
        header = _Header(*HEADER.unpack(raw))
        payload = travelled
        if self._memory is not None and header.flags == Kind.UNITS:
            payload = self._taken(header, travelled)
        if digest(raw, payload) != check:
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

    def close(self) -> None:
        """Let go of the producer's memory, where there is any."""
        if self._memory is not None:
            self._memory.close()

    def _check(self, header: _Header, num_bytes: int) -> None:
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

    def _taken(self, header: _Header, travelled: memoryview) -> memoryview:
        """The payload, from shared memory; where it lies is our own reckoning."""
        assert self._memory is not None
        position = (self._next_unit - self._first_unit) * self._unit_bytes + self._part_bytes
        left = (self._end_unit - self._next_unit) * self._unit_bytes - self._part_bytes
        if not 0 < header.num_bytes <= min(max_payload(placed=True), left):
            raise self._refuse(Refusal.RANGE, f"{header.num_bytes} bytes where {left} are left")
        return self._memory.take(position, header.num_bytes, travelled)

    def _units(self, header: _Header, payload: memoryview) -> Units | None:
        first_unit, num_units, offset = header.first_unit, header.num_units, header.offset
        total = num_units * self._unit_bytes
        if first_unit != self._next_unit or offset != self._part_bytes:
            due = f"unit {self._next_unit}+{self._part_bytes} is due"
            raise self._refuse(Refusal.SEQUENCE, f"unit {first_unit}+{offset} where {due}")
        if not 0 < num_units <= self._end_unit - first_unit or not payload.nbytes:
            raise self._refuse(
                Refusal.RANGE, f"{num_units} units where {self._end_unit} is the end"
            )
        most = units_per_frame(self._unit_bytes, placed=self._memory is not None)
        if num_units > most or offset + payload.nbytes > total:
            raise self._refuse(Refusal.RANGE, "it holds more than its units")
        if payload.nbytes < total:
            if self._part is None:  # for all of it at once: it never grows
                self._part = np.empty(total, np.uint8).data
            elif self._part.nbytes != total:
                raise self._refuse(Refusal.RANGE, f"{num_units} units after a part of others")
            self._part[offset : offset + payload.nbytes] = payload
            self._part_bytes += payload.nbytes
            if self._part_bytes < total:
                return None
            payload, self._part, self._part_bytes = self._part, None, 0
        self._next_unit += num_units
        return Units(first_unit, num_units, payload)

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
