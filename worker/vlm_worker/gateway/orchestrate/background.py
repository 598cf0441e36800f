"""Tasks that outlive the request that started them: telling workers that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Background:
    """Holds them until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None], *, name: str) -> None:
        """Run to its end; its errors are its own to answer."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for all of them."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
