"""Channel of units from a receiving thread to the event loop, with backpressure and few wakeups.

thread   put, put, ..., end     blocks while too many batches with own memory are pending
loop     units                  all that arrived, then the next ones

If units are already in their destination, the thread wakes the loop for the first batch, then for
every `BATCHES_PER_WAKEUP`-th, and at the end: each wakeup competes with the next copy for a core.
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

MAX_PENDING_BATCHES: Final = 2
"""Pending batches of units, of at most 4 MiB each, while the next one is received."""
BATCHES_PER_WAKEUP: Final = 16
"""Small enough that an engine has few blocks to record between two steps."""


class ReceiveChannel:
    """Units of one thread. Created on the loop; `max_pending` bounds pending batches, if given.

    The thread calls `put` and `end`; the loop calls the rest.
    """

    def __init__(self, *, max_pending: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._units: collections.deque[Units] = collections.deque()
        self._changed = asyncio.Event()
        self._is_woken = False
        self._num_unannounced = 0
        self._has_ended = False
        self._is_given_up = False
        self._capacity = None if max_pending is None else threading.Semaphore(max_pending)

    def put(self, units: Units) -> None:
        """Send the next units; blocks while too many are pending."""
        if self._capacity is not None and not self._is_given_up:
            self._capacity.acquire()
        self._units.append(units)
        if self._num_unannounced == 0 and not self._is_woken:
            self._is_woken = True
            self._wake()
        if self._capacity is None:
            self._num_unannounced = (self._num_unannounced + 1) % BATCHES_PER_WAKEUP

    def end(self) -> None:
        """End the channel: the thread sends no more."""
        self._has_ended = True
        self._wake()

    def give_up(self) -> None:
        """Stop reading: the thread no longer blocks and runs to its end."""
        self._is_given_up = True
        if self._capacity is not None:
            self._capacity.release()  # to a thread that may already wait

    async def units(self) -> AsyncGenerator[Units]:
        """All units, until the thread ends."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._is_woken = False  # before reading: a later put wakes again
            has_ended = self._has_ended
            while self._units:
                units = self._units.popleft()
                if self._capacity is not None:
                    self._capacity.release()
                else:
                    units = self._with_next(units)
                yield units
            if has_ended:
                return

    def _with_next(self, units: Units) -> Units:
        """One batch of all pending units that are adjacent in their destination."""
        num_units = units.num_units
        while self._units and self._units[0].first_unit == units.first_unit + num_units:
            num_units += self._units.popleft().num_units
        return dataclasses.replace(units, num_units=num_units)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)
