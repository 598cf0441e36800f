"""Transports: how bytes of units get from a producer to a consumer; leases always use gRPC.

    consumer                                  producer
    invitation() ───────── FetchRequest ────▶ expose(invitation) ─▶ Exposure, or None: in frames
    view(opening) ◀──────── OPEN frame ────── .opening
    .read(position) ◀────── header, digest ── .write(position, data)
    close, then Release ──────────────────▶   close: no consumer reads
                                              abandon: a consumer may still read

    stream           bytes are in the frames: works everywhere
    shared-memory    one machine, one tmpfs directory: optional (`shared_memory.py`)
    nixl             RDMA, or what UCX finds between two pods: an extra (`nixl.py`)

If a transport has no capacity, the bytes are sent in the frames: two full workers cannot deadlock.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.wire.buffers import Memory

STREAM: Final = "stream"
MAX_ABANDONED_PERCENT: Final = 5


class Exposure(Protocol):
    """Memory of the producer that one consumer reads directly, for one transfer.

    `opening` locates it; `num_bytes` counts against the transport's capacity until it ends.
    """

    opening: bytes
    num_bytes: int

    def buffer(self, position: int, num_bytes: int) -> memoryview | None:
        """A view of the exposed memory, so that units can be made there without a copy; or None.

        It may be written even after the exposure has ended.
        """

    def write(self, position: int, data: memoryview) -> memoryview:
        """Expose bytes to the consumer; returns the bytes that must be in the frame."""

    def close(self) -> None:
        """Reuse the memory: the consumer no longer reads it. Idempotent."""

    def abandon(self) -> None:
        """Never reuse the memory: the consumer may still read it."""


class View(Protocol):
    """The consumer side of an exposure."""

    def read(self, position: int, destinations: Memory, *, head: bytes) -> bytes:
        """Copy bytes from `position` to `destinations`, the consumer's own memory.

        Returns:
            XXH3-128 of `head` and of the copy, whatever changes in the producer's memory meanwhile.

        Raises:
            CorruptTransferError: the bytes are not there.
        """

    def close(self) -> None:
        """Stop reading. Idempotent."""


class Transport(Protocol):
    """A transport. Belongs to one event loop; `view` and its `read` are thread-safe.

    Fetches and OPEN frames carry `name`; only sides with the same name use it.
    """

    name: str
    account: ExposureAccount

    def invitation(self) -> bytes:
        """Bytes in a consumer's fetch that tell a producer whether the consumer can use it."""

    def expose(self, invitation: bytes, num_bytes: int) -> Exposure | None:
        """Memory for one transfer; None if the consumer cannot reach it or there is no capacity."""

    def view(self, opening: bytes, num_bytes: int) -> View:
        """Open what a producer has exposed.

        Raises:
            CorruptTransferError: it is not there, or not of this size.
        """

    def close(self) -> None:
        """Free all memory."""


class ExposureSet:
    """Exposures of one transfer, one for each consumer that reads directly; any thread writes."""

    def __init__(self) -> None:
        self._all: list[Exposure] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Exposed bytes, which consumers may read directly."""
        return sum(exposure.num_bytes for exposure in self._all)

    def __contains__(self, exposure: Exposure) -> bool:
        """Whether it was added and neither closed nor abandoned."""
        return exposure in self._all

    def add(self, exposure: Exposure) -> None:
        """Add an exposure that a consumer learns of."""
        self._all.append(exposure)

    def close(self) -> None:
        """Close all: no consumer reads any longer."""
        while self._all:
            self.close_one(self._all.pop())

    def close_one(self, exposure: Exposure) -> None:
        """Close one, which need not be added."""
        if exposure in self._all:
            self._all.remove(exposure)
        with self._lock:
            exposure.close()

    def abandon(self) -> None:
        """Abandon all: a consumer may still read."""
        with self._lock:
            while self._all:
                self._all.pop().abandon()

    def buffer(self, exposure: Exposure, position: int, num_bytes: int) -> memoryview | None:
        """See `Exposure.buffer`."""
        with self._lock:
            return exposure.buffer(position, num_bytes)

    def write(self, exposure: Exposure, position: int, data: memoryview) -> memoryview:
        """See `Exposure.write`."""
        with self._lock:  # not to memory that was closed meanwhile
            return exposure.write(position, data)


class ExposureAccount:
    """Bytes exposed to consumers. `used` and `lost` together never exceed `capacity`.

    used        a consumer may read them; free again after its release or closed stream
    abandoned   the consumer confirmed nothing; not reused while this process runs
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self.abandoned = 0
        self.num_exposed = 0

    def take(self, num_bytes: int) -> bool:
        """Count bytes as used; False if they exceed the capacity."""
        if num_bytes > self.capacity - self.used - self.abandoned:
            return False
        self.used += num_bytes
        self.num_exposed += 1
        return True

    def release(self, num_bytes: int) -> None:
        """Count bytes as free again."""
        assert num_bytes <= self.used
        self.used -= num_bytes
        self.num_exposed -= 1

    def abandon(self, num_bytes: int) -> None:
        """Count used bytes as abandoned."""
        self.release(num_bytes)
        self.abandoned += num_bytes

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this worker should restart; None if it is healthy."""
        if self.abandoned * 100 <= self.capacity * MAX_ABANDONED_PERCENT:
            return None
        return (
            f"{self.abandoned} of {self.capacity} bytes are exposed to peers that never "
            "confirmed the end of their read"
        )


class ByteStream:
    """All bytes are in the frames; no memory is exposed."""

    name = STREAM

    def __init__(self) -> None:
        self.account = ExposureAccount(0)

    def invitation(self) -> bytes:
        return b""

    def expose(self, invitation: bytes, num_bytes: int) -> None:
        """None: it exposes no memory."""

    def view(self, opening: bytes, num_bytes: int) -> View:
        """Refuse: no memory is exposed."""
        raise CorruptTransferError(
            f"{len(opening)} bytes of an opening for {num_bytes}; all are due in the frames",
            refusal=Refusal.MEMORY,
        )

    def close(self) -> None:
        """Nothing to free."""
