"""Tasks that run as long as the process: one that ends is logged and started again.

runs ─ ends or fails ─▶ logged ─ 1 s, 2 s, ... 30 s ─▶ runs
                           └─ the fifth time in a row: /healthz says 503
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS: Final = 1.0
MAX_DELAY_SECONDS: Final = 30.0
MAX_FAILURES: Final = 5
"""In a row; then the process should be restarted."""
STEADY_SECONDS: Final = 60.0
"""A task that ran for so long did not fail in a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failures:
    """How often a task ended in a row."""

    count: int = 0

    def after(self, seconds: float) -> Failures:
        """It ended again, after so many seconds."""
        return Failures(1 if seconds >= STEADY_SECONDS else self.count + 1)

    @property
    def delay_seconds(self) -> float:
        """Until it is started again."""
        return min(FIRST_DELAY_SECONDS * 2.0 ** (min(self.count, 10) - 1), MAX_DELAY_SECONDS)

    @property
    def too_many(self) -> bool:
        """Whether to start it again is hopeless."""
        return self.count >= MAX_FAILURES


class Supervisor:
    """The tasks of one process. `clock` and `sleep` are the event loop's."""

    def __init__(
        self,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._failures: dict[str, Failures] = {}
        self._started: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` for ever, until `close`."""
        self._tasks.append(asyncio.create_task(self._run(name, work), name=name))

    @property
    def unhealthy_because(self) -> str | None:
        """Which task fails again and again; None if all run."""
        now = self._clock()
        failing = [
            name
            for name, failures in self._failures.items()
            if failures.too_many and now - self._started[name] < STEADY_SECONDS
        ]
        return f"the task {failing[0]!r} fails again and again" if failing else None

    async def close(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            started = self._started[name] = self._clock()
            try:
                await work()
                logger.error("a task ended that never should", extra={"task": name})
            except Exception:
                logger.exception("a task failed; it is started again", extra={"task": name})
            failures = self._failures.get(name, Failures()).after(self._clock() - started)
            self._failures[name] = failures
            await self._sleep(failures.delay_seconds)
