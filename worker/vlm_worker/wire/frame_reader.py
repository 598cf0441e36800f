"""The consumer's side of frames: each is held to what we ourselves know, or the transfer is void.

    frame ─▶ size ─▶ header: whose, which, where ─▶ payload ─▶ digest ─▶ whole units, or the commit

Nothing that a frame says is believed and nothing is allocated by it: unit size, first and last unit
and identity come from our own layout and request, and a part of a unit is at most one unit. A frame
is read whole, or its head first and its payload into the memory where its units shall lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import xxhash

from vlm_worker.errors import CorruptTransferError, IncompatibleError, Refusal
from vlm_worker.wire.assembly import NOTHING, Assembly
from vlm_worker.wire.frames import (
    COMMIT,
    FINISH,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_LARGE_BYTES,
    MAX_OPENING_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PLACED_BYTES,
    NO_TOKEN,
    VERSION,
    Commit,
    Header,
    Kind,
    TransferId,
    Units,
)
from vlm_worker.wire.rooms import Rooms


class Memory(Protocol):
    """Where a producer put the bytes of units; `transfer.transport.View`."""

    def take(self, position: int, rooms: Sequence[memoryview], *, head: bytes) -> bytes:
        """Fill `rooms` with the bytes from a position on; their digest after that of `head`."""

    def close(self) -> None:
        """Read no more."""


Open = Callable[[str, bytes, int], Memory]
"""`open(transport, opening, num_bytes)`: where a transfer of so many bytes lies."""


class FrameReader:
    """Takes frames in order and gives whole units, or the commit. One transfer, one reader.

    Args:
        identity: what every frame must carry.
        unit_bytes: size of a unit, from our own layout.
        first_unit: where the transfer begins.
        end_unit: where it ends, from what we ourselves know of the request.
        open_memory: finds memory that the producer shares; None refuses it.
        into: memory for all units, from the first one on: that is where they are then, checked or
            not. If it is followed, they are given without their bytes; if not, none are, and the
            transfer may not end without all of them. Without it each run has memory of its own.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        first_unit: int,
        end_unit: int,
        open_memory: Open | None = None,
        into: Rooms | None = None,
    ) -> None:
        self._identity = identity
        self._transfer_hash = identity.transfer_hash
        self._pod_hash = identity.pod_hash
        self._assembly = Assembly(
            unit_bytes=unit_bytes,
            first_unit=first_unit,
            end_unit=end_unit,
            into=into,
            refuse=self._refuse,
        )
        self._end_unit = end_unit
        self._open_memory = open_memory
        self._memory: Memory | None = None
        self._sequence = 0
        self._head: tuple[Header, bytes] | None = None
        self._room = NOTHING
        self._digest: Any = None
        self._taken: bytes | None = None
        self._num_come = 0
        self._in_place = False
        self._most = MAX_PAYLOAD_BYTES
        self.commit: Commit | None = None

    @property
    def num_bytes(self) -> int:
        """Of whole units so far."""
        return self._assembly.num_bytes

    @property
    def total_bytes(self) -> int:
        """Of all units, by our own reckoning."""
        return self._assembly.total_bytes

    @property
    def is_in_place(self) -> bool:
        """Whether units come without their bytes, or not at all: nobody has to put them away."""
        return self._assembly.into is not None

    @property
    def is_followed(self) -> bool:
        """Whether units are given as they come."""
        return self._assembly.is_followed

    @property
    def may_wait(self) -> bool:
        """Whether a frame may have bytes fetched from a producer's memory: nothing for a loop."""
        return self._open_memory is not None

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
        return self._end(view[HEADER_BYTES:], len(frame) - HEADER_BYTES)

    def begin(self, head: memoryview, num_bytes: int) -> list[memoryview]:
        """The memory for the payload of `num_bytes` that follows this head, in order; `come` next.

        Frames that come this way may be large.

        Raises:
            CorruptTransferError: no such payload is due.
        """
        self._most = MAX_LARGE_BYTES
        header = self._begin(head)
        self._in_place = header.flags == Kind.UNITS and self._memory is None
        most = MAX_LARGE_BYTES if self._in_place else MAX_OPENING_BYTES
        if not 0 <= num_bytes <= most:
            raise self._refuse(Refusal.SIZE, f"a payload of {num_bytes} bytes")
        self._num_come = 0
        if self._in_place:
            total = self._assembly.due(header, num_bytes, most=self._most)
            return self._assembly.parts(total, num_bytes)
        self._room = memoryview(bytearray(num_bytes))
        return [self._room]

    def come(self, part: memoryview) -> None:
        """The next bytes are where `begin` said, and in the cache: the time to check them."""
        self._digest.update(part)
        self._num_come += part.nbytes

    def end(self) -> Units | None:
        """As `read`, of the payload that has come."""
        room, self._room = self._room, NOTHING
        return self._end(room, self._num_come)

    def close(self) -> None:
        """Let go of the producer's memory, where there is any."""
        if self._memory is not None:
            self._memory.close()

    def _begin(self, head: memoryview) -> Header:
        header = Header(*HEADER.unpack(head[: HEADER.size]))
        self._in_place = False
        self._head = header, bytes(head[HEADER.size :])
        self._digest, self._taken = xxhash.xxh3_128(head[: HEADER.size]), None
        return header

    def _end(self, payload: memoryview, num_bytes: int) -> Units | None:
        """Of a payload of `num_bytes` that is here, or in its place already."""
        assert self._head is not None
        header, check = self._head
        if self._memory is not None and header.flags == Kind.UNITS:
            num_bytes = self._take(header, num_bytes)
        if (self._taken or self._digest.digest()) != check:
            raise self._refuse(Refusal.DIGEST, "the digest differs")
        self._check(header, num_bytes)
        self._sequence += 1
        match Kind(header.flags):
            case Kind.UNITS:
                if not self._in_place:
                    total = self._assembly.due(header, num_bytes, most=self._most)
                    self._assembly.put(total, payload)
                return self._assembly.add(header, num_bytes)
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
            ("transfer or its content", header.transfer, self._transfer_hash, Refusal.IDENTITY),
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

    def _take(self, header: Header, num_travelled: int) -> int:
        """Fetch the payload from shared memory; where it lies there is our own reckoning."""
        assert self._memory is not None
        if num_travelled or header.num_bytes > MAX_PLACED_BYTES:
            what = f"{num_travelled} of {header.num_bytes} bytes travelled"
            raise self._refuse(Refusal.MEMORY, what)
        assembly, position = self._assembly, self._assembly.position
        total = assembly.due(header, header.num_bytes, most=MAX_PLACED_BYTES)
        rooms = assembly.parts(total, header.num_bytes)
        self._taken = self._memory.take(position, rooms, head=HEADER.pack(*header))
        self._in_place = True
        return header.num_bytes

    def _open(self, payload: memoryview) -> None:
        if self._open_memory is None or self._sequence != 1:
            raise self._refuse(Refusal.SEQUENCE, "shared memory was not asked for")
        if not 1 <= payload.nbytes <= MAX_OPENING_BYTES:
            raise self._refuse(Refusal.SIZE, f"an opening of {payload.nbytes} bytes")
        length = 1 + payload[0]
        name = bytes(payload[1:length]).decode(errors="replace")
        total = self._assembly.total_bytes
        self._memory = self._open_memory(name, bytes(payload[length:]), total)

    def _read_commit(self, payload: memoryview) -> None:
        if payload.nbytes != COMMIT.size:
            raise self._refuse(Refusal.COMMIT, "a commit of a wrong size")
        fields: tuple[Any, ...] = COMMIT.unpack(payload)
        num_units, num_tokens, token, num_frames, finish = fields
        if num_frames != self._sequence - 1 or finish >= len(FINISH) or not self._assembly.is_whole:
            raise self._refuse(Refusal.COMMIT, "the commit does not fit the frames before it")
        reason = FINISH[finish]
        if reason is not None and not self._assembly.is_followed:
            raise self._refuse(Refusal.COMMIT, f"it ends as {reason.value}, and all units are due")
        next_unit = self._assembly.next_unit
        if reason is None and (num_units != self._end_unit or next_unit != num_units):
            raise self._refuse(
                Refusal.COMMIT,
                f"committed at unit {next_unit} of {num_units}, {self._end_unit} are due",
            )
        self.commit = Commit(
            num_units=num_units,
            num_tokens=num_tokens,
            first_token_id=None if token == NO_TOKEN else token,
            finish_reason=reason,
        )

    def _refuse(self, refusal: Refusal, what: str) -> CorruptTransferError:
        return CorruptTransferError(f"frame {self._sequence}: {what}", refusal=refusal)
