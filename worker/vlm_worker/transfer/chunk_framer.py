"""Units -> frames, chunk by chunk, in the thread that iterates over them.

A chunk is copied, digested and sent before the next one: it stays in the cache, and no other thread
is woken. The socket's buffer holds what a slow network has not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.wire.buffers import BufferViews, address_of
from vlm_worker.wire.frames import MAX_PAYLOAD_BYTES, Commit, Frame, FrameWriter

EXPORT_BYTES: Final = 4 << 20
NUM_CHUNKS: Final = 8
"""Chunks of a small transfer: the consumer validates one while the next is built."""

Export = Callable[[int, int, memoryview], memoryview | BufferViews]
"""`export(first_unit, num_units, buffer)` returns `[num_units, unit_bytes]`: a copy in `buffer`, of
that size; or memory that does not change; or views that must be copied. Thread-safe."""


class ChunkFramer:
    """The units of one transfer for one consumer.

    Args:
        unit_bytes: of one unit; a chunk has as many as fit `chunk_bytes`, at least one, and also a
            remainder of less than half of that.
        first_unit: the first unit of the consumer.
        chunk_bytes: see `chunk_bytes_of`.
        buffer: `buffer(first_unit, num_bytes)` is exposed memory in which to make a chunk, or None.
        opening: the first frame, if there is one.

    Attributes:
        next_unit: the first unit that is not in a frame yet.
        gone: why the units ended early, or None.
        is_committed: the commit was returned.
    """

    def __init__(
        self,
        export: Export,
        writer: FrameWriter,
        *,
        unit_bytes: int,
        first_unit: int,
        chunk_bytes: int,
        buffer: Callable[[int, int], memoryview | None],
        opening: Frame | None = None,
    ) -> None:
        self.next_unit = first_unit
        self.gone: GoneError | None = None
        self.is_committed = False
        self._export = export
        self._writer = writer
        self._unit_bytes = unit_bytes
        self._batch = max(1, chunk_bytes // unit_bytes)
        self._buffer = buffer
        self._opening = opening
        self._own_buffer = memoryview(b"")

    def run(self, end_unit: int, commit: Commit | None) -> Iterator[Frame]:
        """The frames up to a unit, and the commit if given; each is valid until the next one.

        Raises:
            CorruptTransferError: an export has another size than its units.
        """
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
            yield self._writer.commit(commit)

    def _next_chunk(self, end_unit: int) -> Iterable[Frame]:
        remaining, max_units = end_unit - self.next_unit, self._batch * 3 // 2
        num_units = remaining if remaining <= max_units else self._batch
        num_bytes = num_units * self._unit_bytes
        exposed = self._buffer(self.next_unit, num_bytes)
        buffer = self._own(num_bytes) if exposed is None else exposed
        data = self._export(self.next_unit, num_units, buffer)
        if (data.num_bytes if isinstance(data, BufferViews) else data.nbytes) != num_bytes:
            raise CorruptTransferError("the export has another size than the layout")
        if isinstance(data, memoryview) and exposed is not None and not _are_same(data, exposed):
            data = BufferViews([data.cast("B")], lambda: None)
        frames = (
            self._writer.copy(data, buffer)
            if isinstance(data, BufferViews)
            else self._writer.write(data)
        )
        self.next_unit += num_units
        return frames

    def _own(self, num_bytes: int) -> memoryview:
        if self._own_buffer.nbytes < num_bytes:
            self._own_buffer = allocate_buffer(num_bytes)
        return self._own_buffer[:num_bytes]


def chunk_bytes_of(num_bytes: int, *, large: bool) -> int:
    """The chunk size of a transfer: small enough that both sides work in parallel.

    Chunks near 1 MiB fit the L2 cache; smaller ones cost more calls than they save. If frames are
    not `large`, several are made of one chunk.
    """
    if not large:
        return EXPORT_BYTES
    return min(EXPORT_BYTES, max(MAX_PAYLOAD_BYTES, num_bytes // NUM_CHUNKS))


def _are_same(one: memoryview, other: memoryview) -> bool:
    """Whether two views of equal size are the same memory."""
    return address_of(one) == address_of(other)


def allocate_buffer(num_bytes: int) -> memoryview:
    """Uninitialised memory; its pages are allocated when they are written."""
    buffer: memoryview = np.empty(num_bytes, np.uint8).data
    return buffer
