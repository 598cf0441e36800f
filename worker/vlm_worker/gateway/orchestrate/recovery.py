"""How far a gateway goes to save a request: retries, patience, and a place to wait, all bounded.

retry     a stream that went on is moved whenever its pods are lost; an attempt that delivered
          nothing takes from the budget, so that a storm adds a tenth to the load, no more
patience  counts from when a pool lost its pods: whoever comes later waits as much less
room      who finds it full is told at once when to come back
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from vlm_worker.errors import OverloadedError, WorkerError

# As many as one pod runs at once: all of its requests may be moved when it dies.
BURST_RETRIES: Final = 256.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_SECOND: Final = 1.0
RETRY_AFTER_SECONDS: Final = 1.0


class RetryBudget:
    """A bucket of retries, filled by requests and a little by time. `now` is in seconds."""

    def __init__(self, burst: float, *, now: float) -> None:
        self._burst = burst
        self._left = burst
        self._filled_at = now

    def request(self) -> None:
        """A request came: a tenth of a retry more."""
        self._left = min(self._burst, self._left + RETRIES_PER_REQUEST)

    def take(self, *, now: float) -> bool:
        """Take a retry; False where none is left."""
        passed, self._filled_at = now - self._filled_at, now
        self._left = min(self._burst, self._left + RETRIES_PER_SECOND * passed)
        if self._left < 1:
            return False
        self._left -= 1
        return True


class WaitingRoom:
    """Requests that wait until a pod has room."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.num_waiting = 0

    @property
    def full(self) -> bool:
        """Nobody may come in."""
        return self.num_waiting >= self._size

    @contextlib.contextmanager
    def wait(self, cause: WorkerError) -> Iterator[None]:
        """Wait inside; raises OverloadedError of `cause` at once where it is full."""
        if self.full:
            raise self.refusal() from cause
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def refusal(self) -> OverloadedError:
        """What one more request is told."""
        return OverloadedError(
            f"{self.num_waiting} requests wait for room already",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )


class Recovery:
    """What all requests of a gateway share in it.

    A request waits `patience_seconds` for another pod after the loss of a pool; at most
    `max_waiting` requests wait for room at once.
    """

    def __init__(
        self,
        *,
        patience_seconds: float,
        max_waiting: int,
        clock: Callable[[], float],
        burst_retries: float = BURST_RETRIES,
    ) -> None:
        self.clock = clock
        self.patience_seconds = patience_seconds
        self.budget = RetryBudget(burst_retries, now=clock())
        self.room = WaitingRoom(max_waiting)
