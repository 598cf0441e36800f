"""Transports: how bytes of units get from a producer to a consumer; leases always use gRPC.

    consumer                                  producer
    invitation() ───────── FetchRequest ────▶ expose(invitation) ─▶ Exposure, or None: in frames
    view(opening) ◀──────── OPEN frame ────── .opening
    .read(position) ◀────── header, digest ── .write(position, source)
    close, then Release ──────────────────▶   close: no consumer reads
                                              abandon: a consumer may still read

    stream           bytes are in the frames: works everywhere
    shared-memory    one machine, one tmpfs directory: optional (`shared_memory.py`)
    nixl             RDMA, or what UCX finds between two pods: an extra (`nixl.py`)

If a transport has no capacity, the bytes are sent in the frames: two full workers cannot deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.wire.buffers import MemoryKind, Regions
from vlm_worker.wire.frame_reader import View

STREAM: Final = "stream"
HOST_ONLY: Final = frozenset({MemoryKind.HOST})
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

    def write(self, position: int, source: Regions) -> memoryview:
        """Expose bytes to the consumer; returns the bytes that must be in the frame.

        Device memory is not copied: it is lent until the exposure ends.
        """

    def close(self) -> None:
        """Reuse the memory: the consumer no longer reads it. Idempotent."""

    def abandon(self) -> None:
        """Never reuse the memory: the consumer may still read it."""


class Transport(Protocol):
    """A transport. Belongs to one event loop; `view` and its `read` are thread-safe.

    Fetches and OPEN frames carry `name`; only sides with the same name use it. `accepts` are the
    kinds of memory that `Exposure.write` and `View.read` take, HOST always; other memory is staged
    (`wire.buffers.stage`).
    """

    name: str
    accepts: frozenset[MemoryKind]
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
    """Exposures of one transfer, one for each consumer that reads directly; any thread writes.

    An exposure of device memory holds loans of it, returned once its consumer can no longer read,
    or when its quarantine ends. A consumer that still reads then gets bytes of another digest.
    """

    def __init__(self) -> None:
        self._all: list[Exposure] = []
        self._loans: dict[Exposure, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(exposure.num_bytes for exposure in self._all)

    def __contains__(self, exposure: Exposure) -> bool:
        """Whether it was added and neither closed nor abandoned."""
        return exposure in self._all

    def add(self, exposure: Exposure) -> None:
        self._all.append(exposure)

    def lend(self, exposure: Exposure, return_loan: Callable[[], None]) -> None:
        """Keep a loan of device memory until the exposure ends, or return it if it has ended."""
        if exposure in self._all:
            self._loans.setdefault(exposure, []).append(return_loan)
        else:
            return_loan()

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
        self._return(exposure)

    def abandon(self) -> None:
        """Abandon all: a consumer may still read."""
        while self._all:
            exposure = self._all.pop()
            with self._lock:
                exposure.abandon()
            self._return(exposure)

    def _return(self, exposure: Exposure) -> None:
        for return_loan in self._loans.pop(exposure, ()):
            return_loan()

    def buffer(self, exposure: Exposure, position: int, num_bytes: int) -> memoryview | None:
        with self._lock:
            return exposure.buffer(position, num_bytes)

    def write(self, exposure: Exposure, position: int, source: Regions) -> memoryview:
        with self._lock:  # not to memory that was closed meanwhile
            return exposure.write(position, source)


class ExposureAccount:
    """Bytes exposed to consumers. `used` and `abandoned` together never exceed `capacity`.

    used        a consumer may read them; free again after its release or closed stream
    abandoned   the consumer confirmed nothing; not reused while this process runs
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self.abandoned = 0
        self.num_exposed = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.abandoned

    def take(self, num_bytes: int) -> bool:
        """Count bytes as used; False if they exceed the capacity."""
        if num_bytes > self.free:
            return False
        self.used += num_bytes
        self.num_exposed += 1
        return True

    def release(self, num_bytes: int) -> None:
        assert num_bytes <= self.used
        self.used -= num_bytes
        self.num_exposed -= 1

    def abandon(self, num_bytes: int) -> None:
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
    accepts = HOST_ONLY

    def __init__(self) -> None:
        self.account = ExposureAccount(0)

    def invitation(self) -> bytes:
        return b""

    def expose(self, invitation: bytes, num_bytes: int) -> None: ...

    def view(self, opening: bytes, num_bytes: int) -> View:
        raise CorruptTransferError(
            f"{len(opening)} bytes of an opening for {num_bytes}; all are due in the frames",
            refusal=Refusal.MEMORY,
        )

    def close(self) -> None: ...
