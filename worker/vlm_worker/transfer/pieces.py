"""Units -> frames, a piece at a time, in whichever thread goes through them.

A piece is copied, checked and sent before the next one: it is in the cache all the while, and no
other thread is woken for it. What a slow network has not taken yet waits in its socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.wire.copying import Lying, address_of
from vlm_worker.wire.frames import MAX_PAYLOAD_BYTES, Commit, Frame, FrameWriter

EXPORT_BYTES: Final = 4 << 20
NUM_PIECES: Final = 8
"""Of a transfer that is not large: a consumer checks one while the next one is made."""

Export = Callable[[int, int, memoryview], memoryview | Lying]
"""`export(first_unit, num_units, room)` gives `[num_units, unit_bytes]`: a copy in `room`, which
has just so many bytes, or memory that nobody writes to meanwhile, or bytes that are to be copied
from where they lie. In any thread."""


class Pieces:
    """The units of one transfer for one consumer.

    Args:
        unit_bytes: of one unit; a piece has as many as fit `piece_bytes`, one at least, and a
            rest that is less than half of that.
        first_unit: where the consumer begins.
        piece_bytes: see `piece_bytes_of`.
        room: `room(first_unit, num_bytes)` is where a piece had best be made, if there is such a
            place.
        opening: the frame that comes before all others, if there is one.

    Attributes:
        next_unit: the first one that is not in a frame yet.
        gone: why there are no more units, though there were to be.
        is_committed: nothing comes any more.
    """

    def __init__(
        self,
        export: Export,
        writer: FrameWriter,
        *,
        unit_bytes: int,
        first_unit: int,
        piece_bytes: int,
        room: Callable[[int, int], memoryview | None],
        opening: Frame | None = None,
    ) -> None:
        self.next_unit = first_unit
        self.gone: GoneError | None = None
        self.is_committed = False
        self._export = export
        self._writer = writer
        self._unit_bytes = unit_bytes
        self._batch = max(1, piece_bytes // unit_bytes)
        self._room = room
        self._opening = opening
        self._own_room = memoryview(b"")

    def run(self, end_unit: int, commit: Commit | None) -> Iterator[Frame]:
        """The frames up to a unit, and the commit where that is known: good until the next frame.

        Raises:
            CorruptTransferError: an export has another size than its units.
        """
        if self._opening is not None:
            opening, self._opening = self._opening, None
            yield opening
        while self.next_unit < end_unit:
            try:
                frames = self._piece(end_unit)
            except GoneError as error:
                self.gone = error
                return
            yield from frames
        if commit is not None:
            self.is_committed = True
            yield self._writer.commit(commit)

    def _piece(self, end_unit: int) -> Iterable[Frame]:
        left, most = end_unit - self.next_unit, self._batch * 3 // 2
        num_units = left if left <= most else self._batch
        num_bytes = num_units * self._unit_bytes
        placed = self._room(self.next_unit, num_bytes)
        room = self._own(num_bytes) if placed is None else placed
        data = self._export(self.next_unit, num_units, room)
        if (data.num_bytes if isinstance(data, Lying) else data.nbytes) != num_bytes:
            raise CorruptTransferError("the export has another size than the layout")
        if isinstance(data, memoryview) and placed is not None and not _are_same(data, placed):
            data = Lying([data.cast("B")], lambda: None)
        frames = (
            self._writer.copy(data, room) if isinstance(data, Lying) else self._writer.write(data)
        )
        self.next_unit += num_units
        return frames

    def _own(self, num_bytes: int) -> memoryview:
        if self._own_room.nbytes < num_bytes:
            self._own_room = room_of(num_bytes)
        return self._own_room[:num_bytes]


def piece_bytes_of(num_bytes: int, *, large: bool) -> int:
    """Of the pieces of a transfer: small ones, so that both sides are at work, but not too small.

    What is digested and then copied is best below the 1 MiB of a core's own cache, and less costs
    more steps than it saves. Where frames are not `large`, they are cut out of pieces that are.
    """
    if not large:
        return EXPORT_BYTES
    return min(EXPORT_BYTES, max(MAX_PAYLOAD_BYTES, num_bytes // NUM_PIECES))


def _are_same(one: memoryview, other: memoryview) -> bool:
    """Whether these bytes lie in the same place; both are as many."""
    return address_of(one) == address_of(other)


def room_of(num_bytes: int) -> memoryview:
    """Memory that costs nothing until it is written."""
    room: memoryview = np.empty(num_bytes, np.uint8).data
    return room
