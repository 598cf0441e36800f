"""Units on their way from a thread that receives them to the loop, which is woken once for many.

thread   put, put, ..., end     waits while too many are not taken that have memory of their own
loop     units                  all that have come, then the next ones

Of units that lie in their place the loop is told with the first run, then with every
`RUNS_TO_TELL`-th, and at the end: both want the core that the next copy runs on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator
from typing import Final

from vlm_worker.wire.frames import Units

MAX_UNTAKEN: Final = 2
"""Runs of units, of at most 4 MiB, that wait to be taken while the next one is received."""
RUNS_TO_TELL: Final = 16
"""Few enough that an engine, which notes their blocks between two steps, has little to note."""


class Come:
    """What one thread has received. Made on the loop; at most `most` wait there, if that is given.

    `put` and `end` are for the thread; all else is for the loop.
    """

    def __init__(self, *, most: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._units: collections.deque[Units] = collections.deque()
        self._changed = asyncio.Event()
        self._is_told = False
        self._num_untold = 0
        self._has_ended = False
        self._is_given_up = False
        self._room = None if most is None else threading.Semaphore(most)

    def put(self, units: Units) -> None:
        """The next ones; waits for room."""
        if self._room is not None and not self._is_given_up:
            self._room.acquire()
        self._units.append(units)
        if self._num_untold == 0 and not self._is_told:
            self._is_told = True
            self._tell()
        if self._room is None:
            self._num_untold = (self._num_untold + 1) % RUNS_TO_TELL

    def end(self) -> None:
        """The thread puts no more."""
        self._has_ended = True
        self._tell()

    def give_up(self) -> None:
        """Nobody takes any more: let the thread go on to where it ends."""
        self._is_given_up = True
        if self._room is not None:
            self._room.release()  # to the one that may wait already

    async def units(self) -> AsyncGenerator[Units]:
        """All units, to the thread's end."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._is_told = False  # before we look: what is put meanwhile tells anew
            has_ended = self._has_ended
            while self._units:
                units = self._units.popleft()
                if self._room is not None:
                    self._room.release()
                else:
                    units = self._with_next(units)
                yield units
            if has_ended:
                return

    def _with_next(self, units: Units) -> Units:
        """One run of all that have come and lie side by side in their places."""
        num_units = units.num_units
        while self._units and self._units[0].first_unit == units.first_unit + num_units:
            num_units += self._units.popleft().num_units
        return dataclasses.replace(units, num_units=num_units)

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._changed.set)
