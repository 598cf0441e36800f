"""Runs long computations on the event loop in short turns, with rests between them.

    steps ─ 0.5 ms ─▶ rest 1 ms: other requests ─▶ steps ─ 0.5 ms ─▶ rest ─▶ ... ─▶ result

A computation is a generator that yields where it may be interrupted and returns its result. Each
step between two yields must be short. A thread would not help, because the steps hold the
interpreter lock. After each system call the loop would wait for that lock as long as a step takes.

One yield to the loop per turn is not enough. A token needs some ten iterations of the loop to reach
the client. If a turn ran in each of them, the token would wait for ten turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Final, TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A computation that yields where it may be interrupted."""

TURN_SECONDS: Final = 0.0005
REST_SECONDS: Final = 0.001


def at_once(steps: Steps[T]) -> T:
    """Run a computation without interruption; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Turns:
    """Runs the computations of all requests of a gateway, one turn at a time, in FIFO order.

    So their share of the loop is bounded for any number of requests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._only = asyncio.Lock()

    async def run(self, steps: Steps[T]) -> T:
        """Run a computation in turns; return its result. A short one needs no rest."""
        while True:
            ends = self._clock() + TURN_SECONDS
            try:
                next(steps)
                while self._clock() < ends:
                    next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.rest()

    async def rest(self) -> None:
        """Leave the loop to other tasks, after the rests that were requested earlier."""
        async with self._only:
            await asyncio.sleep(REST_SECONDS)
