"""How the bytes of units get from a producer to a consumer. Frames, leases and commits stay gRPC's.

    consumer                                  producer
    invitation() ───────── FetchRequest ────▶ expose(invitation) ─▶ Exposure, or None: in the frames
    view(opening) ◀──────── OPEN frame ────── .opening
    .take(position) ◀────── header, digest ── .place(position, data)
    close, then Release ──────────────────▶   close: nobody can be reading any more
                                              abandon: somebody may be, for all we know

    stream           the bytes travel in the frames: works everywhere
    shared-memory    one machine, one directory in memory: opted in (`shared_memory.py`)
    nixl             RDMA, or whatever UCX finds between two pods: an extra (`nixl.py`)

A transport that has no room steps aside, and the bytes travel in the frames: two full workers can
not wait for each other here.
"""

from __future__ import annotations

from typing import Final, Protocol

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.wire.copying import Memory

STREAM: Final = "stream"
MAX_LOST_PERCENT: Final = 5


class Exposure(Protocol):
    """Memory of ours that one consumer reads by itself, for one transfer.

    `opening` tells it where; `num_bytes` counts against the transport's capacity until the end.
    """

    opening: bytes
    num_bytes: int

    def room(self, position: int, num_bytes: int) -> memoryview | None:
        """Memory that the consumer reads: what is made there needs no copy to be placed.

        None where there is none. It may be written to even when the exposure has ended.
        """

    def place(self, position: int, data: memoryview) -> memoryview:
        """Put bytes in front of the consumer; returns what of them travels in the frame."""

    def close(self) -> None:
        """The consumer reads no more: the memory may be used again. Idempotent."""

    def abandon(self) -> None:
        """The consumer may be reading for all we know: never use this memory again."""


class View(Protocol):
    """The consumer's side of an exposure."""

    def take(self, position: int, rooms: Memory, *, head: bytes) -> bytes:
        """Fill `rooms`, memory of our own, with the bytes from a position on.

        Returns:
            XXH3-128 of `head` and of all that is in `rooms`: of our copy, whatever is written to
            the producer's memory meanwhile.

        Raises:
            CorruptTransferError: they are not there.
        """

    def close(self) -> None:
        """Read no more. Idempotent."""


class Transport(Protocol):
    """One way for bytes. Lives on one event loop; `view` and its `take` are for any thread.

    `name` stands in fetches and OPEN frames; only those who say the same one use it.
    """

    name: str
    ledger: Ledger

    def invitation(self) -> bytes:
        """What a consumer says of itself in its fetch, so that a producer can tell if it fits."""

    def expose(self, invitation: bytes, num_bytes: int) -> Exposure | None:
        """Memory for one transfer; None where the consumer cannot reach it or there is no room."""

    def view(self, opening: bytes, num_bytes: int) -> View:
        """What a producer has exposed.

        Raises:
            CorruptTransferError: it is not there, or not of this size.
        """

    def close(self) -> None:
        """Give everything back to the machine."""


class Ledger:
    """Bytes exposed to consumers. `used` and `lost` together never exceed `capacity`.

    used   a consumer may read them; they come back with its release or its closed stream
    lost   it never said; they are not used again while this process lives
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self.lost = 0
        self.num_exposed = 0

    def take(self, num_bytes: int) -> bool:
        """Set bytes aside; False where there are not so many."""
        if num_bytes > self.capacity - self.used - self.lost:
            return False
        self.used += num_bytes
        self.num_exposed += 1
        return True

    def give_back(self, num_bytes: int) -> None:
        """A consumer reads no more."""
        assert num_bytes <= self.used
        self.used -= num_bytes
        self.num_exposed -= 1

    def lose(self, num_bytes: int) -> None:
        """A consumer never said whether it reads no more."""
        self.give_back(num_bytes)
        self.lost += num_bytes

    @property
    def complaint(self) -> str | None:
        """Why this worker had better start anew; None while it is well."""
        if self.lost * 100 <= self.capacity * MAX_LOST_PERCENT:
            return None
        return (
            f"{self.lost} of {self.capacity} bytes were exposed to peers that never said whether "
            "they still read"
        )


class ByteStream:
    """All bytes travel in the frames: nothing is exposed."""

    name = STREAM

    def __init__(self) -> None:
        self.ledger = Ledger(0)

    def invitation(self) -> bytes:
        """Nothing to say."""
        return b""

    def expose(self, invitation: bytes, num_bytes: int) -> None:
        """Nothing."""

    def view(self, opening: bytes, num_bytes: int) -> View:
        """There is none, and no producer may say so."""
        raise CorruptTransferError(
            f"{len(opening)} bytes of an opening for {num_bytes}; all were to travel",
            refusal=Refusal.MEMORY,
        )

    def close(self) -> None:
        """Nothing to give back."""
