"""Writes units to the engine while the next ones are received, with a bound on unwritten bytes.

put(units) ─▶ write, write, ...     each starts at once; the engine runs them between two steps
flush      ◀─ all are done
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from vlm_worker.wire.frames import Units

MAX_UNWRITTEN_BYTES: Final = 32 << 20


class WriteWindow:
    """The writes of one transfer. The end of the context cancels writes in flight.

    `await write(units)` writes units; at most `max_bytes` are in flight, or one larger batch.
    """

    def __init__(
        self, write: Callable[[Units], Awaitable[None]], *, max_bytes: int = MAX_UNWRITTEN_BYTES
    ) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._writing: collections.deque[tuple[asyncio.Task[None], int]] = collections.deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel writes that `flush` did not wait for."""
        tasks = [task for task, _ in self._writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def put(self, units: Units) -> None:
        """Start a write; waits while too many bytes are in flight. Raises the error of a write."""
        num_bytes = units.data.nbytes
        self._writing.append((asyncio.create_task(self._do(units)), num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            await self._oldest()

    async def flush(self) -> None:
        """Wait until all is written; raises the error of a write."""
        while self._writing:
            await self._oldest()

    async def _do(self, units: Units) -> None:
        await self._write(units)

    async def _oldest(self) -> None:
        task, num_bytes = self._writing[0]
        await task
        self._writing.popleft()
        self._num_bytes -= num_bytes
