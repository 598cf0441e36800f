"""How far a gateway goes to save a request: retries, patience, and a place to wait, all bounded.

retry     a stream that went on is moved whenever its pods are lost; an attempt that delivered
          nothing takes from the budget, so that a storm adds a tenth to the load, no more
patience  counts from when a pool lost its pods: whoever comes later waits as much less
room      who finds it full is told at once when to come back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from vlm_worker.gateway.memory import Bound, FullError

# As many as one pod runs at once: all of its requests may be moved when it dies.
BURST_RETRIES: Final = 256.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_SECOND: Final = 1.0


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
    """Requests for which no pod has room yet, from the door on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._places: set[Place] = set()

    @property
    def num_waiting(self) -> int:
        """How many are in it."""
        return len(self._places)

    def check(self) -> None:
        """Raise FullError, which says when to come back, where there is no place."""
        if len(self._places) >= self._size:
            raise FullError(
                f"{len(self._places)} requests wait for a worker already, as many as may.",
                Bound.WAITING,
            )

    def enter(self) -> Place:
        """A place for one more request; raises as `check` does."""
        self.check()
        place = Place(self._places)
        self._places.add(place)
        return place


class Place:
    """One request's; it leaves when a pod has room for it, or when it is over."""

    def __init__(self, places: set[Place]) -> None:
        self._places = places

    def leave(self) -> None:
        """Somebody else may wait; idempotent."""
        self._places.discard(self)

    def __enter__(self) -> Self:
        """It is taken already."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave."""
        self.leave()


class Recovery:
    """What all requests of a gateway share in it.

    A request waits `patience_seconds` for another pod after the loss of a pool; `max_waiting`
    requests may be without room at once.
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
