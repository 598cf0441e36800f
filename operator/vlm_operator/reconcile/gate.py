"""Limits the number of turns that decide and write at once; the least rank enters first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Gate:
    """A semaphore whose waiters have ranks. One event loop uses it.

    `asyncio.Semaphore` serves waiters in the order of arrival. If many turns wait, a turn that a
    changed spec caused would wait for all of them.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._arrivals = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def entered(self, rank: float) -> AsyncIterator[None]:
        """Wait for a place; waiters of equal rank enter in the order of arrival."""
        await self._enter(rank)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, rank: float) -> None:
        if self._free > 0:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()  # the place was given before the cancellation arrived
            raise

    def _leave(self) -> None:
        while self._waiting:
            place = heapq.heappop(self._waiting)[2]
            if not place.done():  # a waiter that was cancelled needs no place
                place.set_result(None)
                return
        self._free += 1
