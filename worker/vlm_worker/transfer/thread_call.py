"""Blocking calls on threads, awaited on an event loop.

    run_in_thread(pool, work) ─▶ ThreadCall ─ wait ─▶ result   two loop iterations after its end

An awaited `concurrent.futures.Future` takes four loop iterations, and is cancelled with its waiter.
But what a thread uses may be closed only after the thread has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """One call. Belongs to one event loop and one waiting task."""

    def __init__(self, future: Future[T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: Future[T] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.has_ended = False
        future.add_done_callback(self._notify)

    async def wait(self) -> None:
        """Wait until it ends, with or without error. A cancel does not end it."""
        if not self.has_ended:
            self._waiter = self._loop.create_future()
            await self._waiter

    async def end(self) -> None:
        """Wait until it ends, even if the waiter is cancelled; then re-raise the cancel.

        After that, the memory that the thread used may be reused.
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
        """Its result, or raise its error. Call once, after its end."""
        assert self._ended is not None
        # None breaks a reference cycle that may hold large memory
        ended, self._ended = self._ended, None
        return ended.result()

    def _notify(self, future: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, future)

    def _end(self, future: Future[T]) -> None:
        self.has_ended, self._ended = True, future
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def run_in_thread(pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> ThreadCall[T]:
    return ThreadCall(pool.submit(work, *args))
