"""Units on their way into the engine while the next ones are read.

put(units) ─▶ write, write, ...     each begins at once; the engine does all that it finds
settle     ◀─ all of them are done  between two of its steps
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from vlm_worker.wire.frames import Units

MAX_UNWRITTEN_BYTES: Final = 32 << 20


class Landing:
    """The writes of one transfer. What is under way at the end of the context is given up.

    `await write(units)` puts units in their place; at most `max_bytes` wait for it, or one run of
    units that is larger.
    """

    def __init__(
        self, write: Callable[[Units], Awaitable[None]], *, max_bytes: int = MAX_UNWRITTEN_BYTES
    ) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._writing: collections.deque[tuple[asyncio.Task[None], int]] = collections.deque()

    async def __aenter__(self) -> Self:
        """Nothing to do."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give up what `settle` did not wait for."""
        tasks = [task for task, _ in self._writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def put(self, units: Units) -> None:
        """Begin to write; waits while too much is unwritten. Raises what a write failed with."""
        num_bytes = units.data.nbytes
        self._writing.append((asyncio.create_task(self._do(units)), num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            await self._oldest()

    async def settle(self) -> None:
        """Wait until all is written; raises what a write failed with."""
        while self._writing:
            await self._oldest()

    async def _do(self, units: Units) -> None:
        await self._write(units)

    async def _oldest(self) -> None:
        task, num_bytes = self._writing[0]
        await task
        self._writing.popleft()
        self._num_bytes -= num_bytes
