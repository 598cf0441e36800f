"""Ends what a request does without a worker, if the request ends, or at a deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Guard(Protocol):
    """Awaits what needs no worker, and raises the error of a request that ends meanwhile."""

    async def __call__(self, work: Awaitable[T]) -> T: ...


async def unguarded(work: Awaitable[T]) -> T:
    """Await work that something else ends, or nothing."""
    return await work


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, with a deadline if it waits. Most sends do not, and a timer costs more.

    Raises:
        TimeoutError: it is not done after `seconds`.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return
    async with asyncio.timeout(seconds):
        await _Begun(work, waits_for)


@dataclasses.dataclass(frozen=True, slots=True)
class _Begun:
    """The rest of a coroutine that waits for the future `waits_for`."""

    work: Coroutine[Any, Any, None]
    waits_for: Any

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self.waits_for
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001  it belongs to `work`
                resume = functools.partial(self.work.throw, error)
            else:
                resume = functools.partial(self.work.send, sent)
            try:
                waits_for = resume()
            except StopIteration:
                return
