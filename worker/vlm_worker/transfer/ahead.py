"""The exports of one stream, one piece ahead of what is being sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

EXPORT_BYTES: Final = 4 << 20

Export = Callable[[int, int, memoryview], Awaitable[memoryview]]
"""`await export(first_unit, num_units, room)` gives `[num_units, unit_bytes]` that nobody writes
to meanwhile: as they lie, or a copy in `room`, which has just so many bytes."""


class Ahead:
    """Exports a piece while the one before is sent.

    Two rooms take turns: a piece is in its frames before the next but one is exported, and new
    memory costs more to get from the system than to fill.

    Args:
        export: may give None, where there is nothing any more.
        unit_bytes: of one unit; a piece has as many as fit `EXPORT_BYTES`, one at least.
    """

    def __init__(
        self,
        export: Callable[[int, int, memoryview], Awaitable[memoryview | None]],
        unit_bytes: int,
    ) -> None:
        self._export = export
        self._unit_bytes = unit_bytes
        self._batch = max(1, EXPORT_BYTES // unit_bytes)
        self._rooms = itertools.cycle([room_of(self._batch * unit_bytes) for _ in range(2)])
        self._next: asyncio.Task[memoryview | None] | None = None

    def begin(self, first_unit: int, end_unit: int) -> None:
        """Export from a unit on, unless that has begun or there is none."""
        if self._next is None and first_unit < end_unit:
            self._next = asyncio.create_task(self._piece(first_unit, end_unit))

    async def take(self) -> memoryview | None:
        """What was begun last."""
        assert self._next is not None
        data = await self._next
        self._next = None
        return data

    async def aclose(self) -> None:
        """Give up what was begun and nobody took."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)

    async def _piece(self, first_unit: int, end_unit: int) -> memoryview | None:
        num_units = min(self._batch, end_unit - first_unit)
        room = next(self._rooms)
        return await self._export(first_unit, num_units, room[: num_units * self._unit_bytes])


def room_of(num_bytes: int) -> memoryview:
    """Memory that costs nothing until it is written."""
    room: memoryview = np.empty(num_bytes, np.uint8).data
    return room
