"""The exposures of one transfer: memory for each of its consumers, written by any thread.

add ─▶ buffer, write ─▶ close: its consumer no longer reads      abandon: one may still read
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from vlm_worker.transfer.transport import Exposure


class ExposureSet:
    """Exposures of one transfer. No bytes are written to memory that was closed meanwhile."""

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

    def writing(self, exposure: Exposure) -> Callable[[int, memoryview], memoryview]:
        """See `Exposure.write`."""

        def write(position: int, data: memoryview) -> memoryview:
            with self._lock:  # not to memory that was closed meanwhile
                return exposure.write(position, data)

        return write
