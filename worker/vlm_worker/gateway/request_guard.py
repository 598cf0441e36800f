"""Ends what a request does for itself, without a worker, if the request ends."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Guard(Protocol):
    """Awaits what needs no worker, and raises the error of a request that ends meanwhile."""

    async def __call__(self, work: Awaitable[T]) -> T: ...


async def unguarded(work: Awaitable[T]) -> T:
    """Await work that something else ends, or nothing."""
    return await work
