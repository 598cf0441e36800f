"""What one transfer has exposed: memory for each of its consumers, written by whichever thread.

add ─▶ room, place ─▶ close: its consumer reads no more      abandon: one may, for all we know
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from vlm_worker.transfer.transport import Exposure


class Exposures:
    """Of one transfer. Nothing is put into memory that was taken back meanwhile."""

    def __init__(self) -> None:
        self._all: list[Exposure] = []
        self._placing = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that consumers may be reading by themselves."""
        return sum(exposure.num_bytes for exposure in self._all)

    def __contains__(self, exposure: Exposure) -> bool:
        """Whether it was added, and neither closed nor abandoned."""
        return exposure in self._all

    def add(self, exposure: Exposure) -> None:
        """A consumer is told of it."""
        self._all.append(exposure)

    def close(self) -> None:
        """No consumer reads any more: all may be used again."""
        while self._all:
            self.close_one(self._all.pop())

    def close_one(self, exposure: Exposure) -> None:
        """As `close`, of one, which may not be known to any consumer yet."""
        if exposure in self._all:
            self._all.remove(exposure)
        with self._placing:
            exposure.close()

    def abandon(self) -> None:
        """A consumer never said that it stopped: none is ever used again."""
        with self._placing:
            while self._all:
                self._all.pop().abandon()

    def room(self, exposure: Exposure, position: int, num_bytes: int) -> memoryview | None:
        """See `Exposure.room`."""
        with self._placing:
            return exposure.room(position, num_bytes)

    def placing(self, exposure: Exposure) -> Callable[[int, memoryview], memoryview]:
        """See `Exposure.place`."""

        def place(position: int, data: memoryview) -> memoryview:
            with self._placing:  # not into memory that was taken back meanwhile
                return exposure.place(position, data)

        return place
