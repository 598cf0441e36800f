"""Runs the turns that the queue starts, each in a task of its own.

take() ─▶ a task ─▶ read pods' /stats ─▶ gate, by rank ─▶ decide and write ─▶ done()
          64 at most                     16 at most
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from vlm_operator.backoff import Backoff
from vlm_operator.errors import ClusterError, ConflictError, LeaseLostError
from vlm_operator.metrics import TURNS
from vlm_operator.reconcile.queue import TIMERS, Cause, Key, Outcome, Turn, WorkQueue
from vlm_operator.reconcile.service import ServiceReconciler

logger = logging.getLogger(__name__)

LIMIT = 64  # concurrent turns; most of them wait for their pods' /stats
SETTLE_SECONDS = 0.05  # collects a burst of events into one turn
STUCK_SECONDS = 120.0  # a longer turn is stuck, because every call in it has a timeout
UNAVAILABLE = Backoff(longest=30.0)
CONFLICT = Backoff(longest=5.0, first=0.25)
CRASH = Backoff(longest=60.0)


class Workers:
    """Turns of all services. One event loop writes it.

    `make` builds the reconciler of one service, at its first turn.
    """

    def __init__(
        self, make: Callable[[str, str], ServiceReconciler], *, clock: Callable[[], float]
    ) -> None:
        self._make = make
        self._clock = clock
        self._queue = WorkQueue()
        self._reconcilers: dict[Key, ServiceReconciler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, key: Key, cause: Cause, *, after: float = SETTLE_SECONDS) -> None:
        self._queue.add(key, cause, now=self._clock(), after=after)
        self._changed.set()

    def notify(self, key: Key, cause: Cause) -> None:
        """Make a turn due if the service is known.

        The first turn of a service reads the whole state. Children outlive their service, so an
        event of a child must not start turns for it.
        """
        if key in self._queue:
            self.add(key, cause)

    def notify_all(self, cause: Cause, *, spread: Callable[[], float] = lambda: 0.0) -> None:
        """Make a turn of every service due, each after `spread()` seconds."""
        for key in self._queue:
            self.add(key, cause, after=spread())

    def problem(self) -> str:
        """Return why this process should be restarted; "" if it is healthy."""
        slow = max(self._queue.running(now=self._clock()).values(), default=0.0)
        return f"a turn has taken {slow:.0f} s" if slow > STUCK_SECONDS else ""

    async def run(self) -> None:
        """Start turns until cancelled; running turns go on."""
        while True:
            self._changed.clear()
            now = self._clock()
            while len(self._tasks) < LIMIT and (next_turn := self._queue.take(now=now)) is not None:
                task = asyncio.create_task(self._turn(next_turn))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            ready = self._queue.ready_at() if len(self._tasks) < LIMIT else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if ready is None else ready - now):
                    await self._changed.wait()

    async def finish(self, seconds: float) -> bool:
        """Wait for running turns, cancel those that take longer; return whether none did."""
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            task.cancel()
        return not late

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _turn(self, turn: Turn) -> None:
        key, began = turn.key, self._clock()
        service = "/".join(key)
        result, outcome = "failed", Outcome(failures={"crash": CRASH})
        try:
            if key not in self._reconcilers:
                self._reconcilers[key] = self._make(*key)
            woken = not turn.causes <= TIMERS
            outcome = await self._reconcilers[key].turn(woken=woken, rank=turn.rank)
            result = "done"
        except LeaseLostError as error:
            # the renewal either ends the process, or adds LEADER once writes are allowed again
            result, outcome = "not leading", Outcome(failures={"lease": UNAVAILABLE})
            logger.warning("not leading", extra={"service": service, "error": str(error)})
        except ClusterError as error:
            backoff = CONFLICT if isinstance(error, ConflictError) else UNAVAILABLE
            result, outcome = error.reason or "refused", Outcome(failures={"call": backoff})
            logger.warning("turn failed", extra={"service": service, "error": str(error)})
        except Exception:
            # a defect in one service's turn must not end the turns of others
            logger.exception("turn crashed", extra={"service": service})
        finally:
            if outcome.gone:
                del self._reconcilers[key]
            self._queue.done(key, outcome, now=self._clock())
            TURNS.labels(result=result).observe(self._clock() - began)
