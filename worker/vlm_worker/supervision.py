"""Supervises tasks that run as long as their process, so that none fails unnoticed.

start(work) ── ends or fails ─▶ logged ── RESTART ─ 1 s, 2 s, ... 30 s ─▶ runs again
                                  │         └─ after five in a row: `unhealthy_reason`, for now
                                  ├────── FAIL ─▶ `unhealthy_reason` for good, `on_failure`
                                  └────── RETURN: an end is no failure, an error is as in FAIL
close()     ── cancels them, which is no failure

asyncio does not report the error of a task that no other task awaits. Health checks use
`unhealthy_reason`, so that a restart of the process can help.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]
"""The work of a task; called once for each run."""

FIRST_DELAY_SECONDS: Final = 1.0
MAX_DELAY_SECONDS: Final = 30.0
MAX_FAILURES: Final = 5
"""Failures in a row after which the process should be restarted."""
STEADY_SECONDS: Final = 60.0
"""A task that ran for this time starts a new row of failures."""


class AtEnd(enum.Enum):
    """How to handle the end of a task's work."""

    RESTART = enum.auto()
    """Start the work again."""
    FAIL = enum.auto()
    """The process cannot continue without the task."""
    RETURN = enum.auto()
    """Returning is normal; an error fails the process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failures:
    count: int = 0

    def after(self, seconds: float) -> Failures:
        """The count after one more end, `seconds` after its start."""
        return Failures(1 if seconds >= STEADY_SECONDS else self.count + 1)

    @property
    def delay_seconds(self) -> float:
        return min(FIRST_DELAY_SECONDS * 2.0 ** (min(self.count, 10) - 1), MAX_DELAY_SECONDS)

    @property
    def too_many(self) -> bool:
        return self.count >= MAX_FAILURES


class Supervisor:
    """Long-lived tasks of one owner, on one event loop.

    `on_failure` is called once, with the first unhealthy_reason of a task that is not restarted.
    """

    def __init__(
        self,
        on_failure: Callable[[str], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._on_failure = on_failure
        self._clock = clock
        self._sleep = sleep
        self._failed: str | None = None
        self._rows: dict[str, tuple[Failures, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, work: Work, *, name: str, at_end: AtEnd) -> asyncio.Task[None]:
        """Run `work` until `close`; the task raises only if it is cancelled."""
        task = asyncio.create_task(self._run(work, name, at_end), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the process should be restarted; None while its tasks run."""
        if self._failed is not None:
            return self._failed
        now = self._clock()
        for name, (failures, started) in self._rows.items():
            if failures.too_many and now - started < STEADY_SECONDS:
                return f"the task {name!r} fails again and again"
        return None

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, work: Work, name: str, at_end: AtEnd) -> None:
        failures = Failures()
        while True:
            started = self._clock()
            if at_end is AtEnd.RESTART:
                self._rows[name] = (failures, started)
            error = await _ended(work)
            if self._closed or (error is None and at_end is AtEnd.RETURN):
                return
            logger.error(
                "a task of this process failed",
                exc_info=error,
                extra={"task": name, "at_end": at_end.name},
            )
            if at_end is not AtEnd.RESTART:
                self._fail(name, error)
                return
            failures = failures.after(self._clock() - started)
            self._rows[name] = (failures, started)
            await self._sleep(failures.delay_seconds)

    def _fail(self, name: str, error: BaseException | None) -> None:
        if self._failed is None:
            why = "it returned" if error is None else repr(error)
            self._failed = f"the task {name!r} failed: {why}"
            self._on_failure(self._failed)


async def _ended(work: Work) -> BaseException | None:
    """Run the work once; returns the error that ended it, None if it returned.

    A library may raise CancelledError although the task is not being cancelled: that is an error.
    """
    try:
        await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except Exception as error:  # noqa: BLE001  the caller logs it
        return error
    return None
