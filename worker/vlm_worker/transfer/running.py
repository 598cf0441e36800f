"""Calls that block, on threads of their own, as an event loop sees them.

    started(pool, work) ─▶ Running ── wait ─▶ result     two turns of the loop after its end

An awaited `concurrent.futures.Future` takes four turns, and is cancelled with whoever waits for it;
what a thread uses may be closed no earlier than the thread has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Running(Generic[T]):
    """One call. Of one event loop, and of one task that waits for it."""

    def __init__(self, future: Future[T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: Future[T] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.has_ended = False
        future.add_done_callback(self._tell)

    async def wait(self) -> None:
        """Until it has ended, however. A cancel leaves it alone."""
        if not self.has_ended:
            self._waiter = self._loop.create_future()
            await self._waiter

    async def end(self) -> None:
        """Wait until it has ended, however often we are cancelled meanwhile.

        What a thread uses, or writes to, may be somebody else's after that.
        """
        cancelled = None
        while not self.has_ended:
            try:
                await self.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def result(self) -> T:
        """What it returned; raises what it raised. Once, when it has ended."""
        ended, self._ended = self._ended, None  # which knows us, and holds what may be large
        assert ended is not None
        return ended.result()

    def _tell(self, future: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._end, future)

    def _end(self, future: Future[T]) -> None:
        self.has_ended, self._ended = True, future
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def started(pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> Running[T]:
    """Do it on a thread of the pool."""
    return Running(pool.submit(work, *args))


async def is_set(changed: asyncio.Event, *, seconds: float) -> bool:
    """False where nothing changed for so long that the consumer wants to know we live."""
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return False
    return True


async def nothing() -> None:
    """There is nothing to wait for."""
