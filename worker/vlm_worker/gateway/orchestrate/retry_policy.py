"""Limits of the gateway's recovery: retries, patience for lost pools, and waiting requests.

retry     a stream that delivered tokens is moved whenever its pods are lost; an attempt that
          delivered nothing takes from the budget, so that retries add at most a tenth to the load
patience  a deadline for a pool that lost its pods; later requests share the same deadline
limit     a request beyond the limit of waiting requests gets a 429 with `Retry-After` at once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from vlm_worker.gateway.memory import Bound, FullError

# The requests that one pod runs at once: if it fails, all of them may be retried.
BURST_RETRIES: Final = 256.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_SECOND: Final = 1.0


class RetryBudget:
    """A token bucket of retries, filled by requests and by time. `now` is in seconds."""

    def __init__(self, burst: float, *, now: float) -> None:
        self._burst = burst
        self._left = burst
        self._filled_at = now

    def request(self) -> None:
        """Add `RETRIES_PER_REQUEST` for a new request."""
        self._left = min(self._burst, self._left + RETRIES_PER_REQUEST)

    def take(self, *, now: float) -> bool:
        """Take a retry; False if none is left."""
        passed, self._filled_at = now - self._filled_at, now
        self._left = min(self._burst, self._left + RETRIES_PER_SECOND * passed)
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RequestLimit:
    """Limit of requests that no pod has admitted yet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tickets: set[AdmissionTicket] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that no pod has admitted."""
        return len(self._tickets)

    def check(self) -> None:
        """Raise FullError, with a retry time, if the limit is reached."""
        if len(self._tickets) >= self._size:
            raise FullError(
                f"{len(self._tickets)} requests wait for a worker already, as many as may.",
                Bound.WAITING,
            )

    def enter(self) -> AdmissionTicket:
        """Admit one more request. Raises as `check` does."""
        self.check()
        ticket = AdmissionTicket(self._tickets)
        self._tickets.add(ticket)
        return ticket


class AdmissionTicket:
    """Counts one request until a pod admits it or it ends."""

    def __init__(self, tickets: set[AdmissionTicket]) -> None:
        self._tickets = tickets

    def leave(self) -> None:
        """Stop counting the request; idempotent."""
        self._tickets.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()


class RetryPolicy:
    """The retry budget, the patience and the request limit of one gateway.

    After a pool lost its pods, a request waits up to `patience_seconds` for another pod. At most
    `max_waiting` requests wait for admission by a pod.
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
        self.request_limit = RequestLimit(max_waiting)
