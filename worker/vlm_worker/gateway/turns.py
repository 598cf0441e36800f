"""Long work on the event loop, in short turns with rests between them.

    steps ─ 0.5 ms ─▶ rest 1 ms: other requests ─▶ steps ─ 0.5 ms ─▶ rest ─▶ ... ─▶ result

A computation is a generator: it yields wherever it may be interrupted and returns its result. Each
step between two yields must be short. A thread would not help: the steps hold the interpreter lock,
and after each system call the loop would wait for that lock as long as a step.

To yield once is not enough. A token passes the loop some ten times on its way to the client; if a
turn stood between any two passes, the token would wait for ten.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Generator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A computation that yields where it may be interrupted."""

TURN_SECONDS: Final = 0.0005
REST_SECONDS: Final = 0.001


def at_once(steps: Steps[T]) -> T:
    """The result of a computation, without interruption."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Turns:
    """The long work of all requests of a gateway: one turn at a time, in the order of asking.

    So its share of the loop is bounded, however many requests work.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._only = asyncio.Lock()

    async def run(self, steps: Steps[T]) -> T:
        """The result of a computation; a short one ends in its first turn, without a rest."""
        done = self._turn(steps)
        while done is None:
            await self.rest()
            done = self._turn(steps)
        return done.result

    async def rest(self) -> None:
        """Leave the loop to others, after all work that asked before."""
        async with self._only:
            await asyncio.sleep(REST_SECONDS)

    def _turn(self, steps: Steps[T]) -> _Done[T] | None:
        """Compute for one turn; None if there is more to do."""
        ends = self._clock() + TURN_SECONDS
        try:
            while True:
                next(steps)
                if self._clock() >= ends:
                    return None
        except StopIteration as end:
            return _Done(end.value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    """The end of a computation."""

    result: T
