"""Tasks that run as long as their process: one that ends by an error is logged and noticed.

start(work, name) ── ends by an error ─▶ log, `complaint`, `on_failure` ─▶ the process is unhealthy
close()           ── cancels them, which is no failure

A task that nobody awaits keeps its error to itself: without this, leases would not be swept any
more and nobody would know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Supervisor:
    """Long-lived tasks of one owner, on one event loop.

    Attributes:
        complaint: why the process had better start anew; None while all of them run.
        on_failure: called with the first complaint.
    """

    def __init__(self, on_failure: Callable[[str], None] = lambda _: None) -> None:
        self.complaint: str | None = None
        self.on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], *, name: str, may_end: bool = False
    ) -> asyncio.Task[None]:
        """Run it until `close`; with `may_end`, a return is no failure."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._done(done, may_end=may_end))
        return task

    async def close(self) -> None:
        """Cancel all and wait for them."""
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None], *, may_end: bool) -> None:
        was_closed = task not in self._tasks
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None and (may_end or was_closed):
            return
        logger.error(
            "a task of this process failed", exc_info=error, extra={"task": task.get_name()}
        )
        if self.complaint is None:
            why = "it returned" if error is None else repr(error)
            self.complaint = f"the task {task.get_name()!r} failed: {why}"
            self.on_failure(self.complaint)
