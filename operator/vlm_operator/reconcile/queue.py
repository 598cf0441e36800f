"""Decides which service gets the next turn, when and why. Pure: no clock, no I/O.

add(key, cause) ─▶ due times by key ─▶ take() ─▶ one turn ─▶ done(key, outcome)
                         ▲                                          │ timers and retries
                         └──────────────────────────────────────────┘

Causes of one key that are due together start one turn. A key has at most one turn at a time; a
cause that arrives during a turn starts another one.

Each turn that only events of children caused adds `REFILL_SECONDS` to the key's debt, which time
reduces. The debt lengthens the gap to the key's next such turn, so that events of a rollout share
turns. If more keys are ready than turns may run, the least rank is first: the time at which the
key became ready, plus a lag that its debt determines. So a changed spec waits for few turns.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Iterator, Mapping
from typing import Final

from vlm_operator.backoff import Backoff

Key = tuple[str, str]  # namespace and name of a VLMService

MIN_GAP_SECONDS = 0.25  # between the end of a turn and the next turn of the key
REFILL_SECONDS = 2.0  # of debt for each turn that only events of children caused
BURST = 4  # of such turns in a row; then the gap is `REFILL_SECONDS`, and the debt is constant
TIMER_LAG_SECONDS = 1.0  # by which a turn that only timers caused may be late
MAX_LAG_SECONDS = 5.0  # by which any turn may be late


class Cause(enum.Enum):
    SPEC = "spec"  # the VLMService has another generation or asks for a turn
    DELETION = "deletion"  # the VLMService is being deleted, or is deleted
    CHILD = "child"  # a child changed
    POD = "pod"  # a pod changed
    CLASS = "class"  # a node class changed
    LEADER = "leader"  # this process may write again
    RESYNC = "resync"  # a list shows a change that no event reported
    TICK = "tick"  # the autoscaler's interval
    DRAIN = "drain"  # pods drain
    WAKE = "wake"  # gateways may queue requests for a pool with zero replicas
    RETRY = "retry"  # the last turn failed


TIMERS: Final = frozenset({Cause.TICK, Cause.DRAIN, Cause.WAKE})
"""Causes by which nothing is known to have changed."""
LIMITED: Final = frozenset({Cause.CHILD, Cause.POD, Cause.CLASS, Cause.RESYNC})
"""Causes that others may trigger at any rate. Only they add to the debt, and wait for it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a turn leaves to do.

    Attributes:
        again: seconds until the next turn, by cause. It replaces the timers of the turns before.
        failures: backoff of each part that failed, by its name. The failures in a row of one part
            determine its pause.
        gone: whether the service is no longer ours. The queue forgets it, except for causes that
            arrived during the turn and those in `again`.
    """

    again: Mapping[Cause, float] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, Backoff] = dataclasses.field(default_factory=dict)
    gone: bool = False


@dataclasses.dataclass
class _State:
    """State of one key.

    Attributes:
        due: when each cause is due. Retries of different parts are separate.
        ready: when the next turn may start; None during a turn, or if nothing is due.
        rank: of that turn among those that wait; the least is first.
        began: when the running turn began; None if there is none.
        paid: when the debt is zero again.
        failures: failures in a row of each part.
    """

    due: dict[tuple[Cause, str], float] = dataclasses.field(default_factory=dict)
    ready: float | None = None
    rank: float = 0.0
    began: float | None = None
    ended: float = float("-inf")
    paid: float = float("-inf")
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def ready_at(self) -> float | None:
        """Return when the next turn may start."""
        if self.began is not None or not self.due:
            return None
        gap = min(REFILL_SECONDS, self.debt_at(self.ended) / BURST)
        first = min(
            max(at, self.ended + gap) if cause in LIMITED else at
            for (cause, _), at in self.due.items()
        )
        return max(first, self.ended + MIN_GAP_SECONDS)

    def debt_at(self, at: float) -> float:
        """Return the debt in seconds."""
        return self.paid - at if self.paid > at else 0.0

    def rank_at(self, ready: float) -> float:
        """Return the rank of the turn that may start at `ready`."""
        debt = self.debt_at(ready)
        return min(max(at, ready) + _lag(cause, debt) for (cause, _), at in self.due.items())


def _lag(cause: Cause, debt: float) -> float:
    """Return by how many seconds other turns may precede a turn with this cause."""
    if cause in LIMITED:
        return min(debt, MAX_LAG_SECONDS)
    return TIMER_LAG_SECONDS if cause in TIMERS else 0.0


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn to run: its key and causes, and its rank among turns that wait."""

    key: Key
    causes: frozenset[Cause]
    rank: float


class WorkQueue:
    """The causes of all keys. One event loop writes it. Times are `now` of a monotonic clock."""

    def __init__(self) -> None:
        self._states: dict[Key, _State] = {}
        # entries that differ from their key's state are outdated
        self._waiting: list[tuple[float, float, Key]] = []  # ready, rank, key
        self._ready: list[tuple[float, float, Key]] = []  # rank, ready, key

    def __contains__(self, key: Key) -> bool:
        """Return whether the key has a turn, a cause or a past that is not gone."""
        return key in self._states

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._states))

    def add(self, key: Key, cause: Cause, *, now: float, after: float = 0.0) -> None:
        """Make a turn due in `after` seconds; an earlier time of the same cause stays."""
        state = self._states.setdefault(key, _State())
        at = now + after
        state.due[cause, ""] = min(at, state.due.get((cause, ""), at))
        self._schedule(key, state)

    def ready_at(self) -> float | None:
        """Return when the next turn of any key may start; None if none is due."""
        self._drop_outdated()
        if self._ready:
            return self._ready[0][1]
        return self._waiting[0][0] if self._waiting else None

    def take(self, *, now: float) -> Turn | None:
        """Start the turn of least rank; None if no key is ready.

        The caller must call `done` at the end of the turn.
        """
        while self._waiting and self._waiting[0][0] <= now:
            ready, rank, key = heapq.heappop(self._waiting)
            heapq.heappush(self._ready, (rank, ready, key))
        self._drop_outdated()
        if not self._ready:
            return None
        rank, _, key = heapq.heappop(self._ready)
        state = self._states[key]
        causes = frozenset(cause for (cause, _), due in state.due.items() if due <= now)
        state.due = {cause: due for cause, due in state.due.items() if due > now}
        state.ready, state.began = None, now
        if causes <= LIMITED:
            state.paid = max(now, state.paid) + REFILL_SECONDS
        return Turn(key, causes, rank)

    def done(self, key: Key, outcome: Outcome, *, now: float) -> None:
        state = self._states[key]
        # without a failure no retry is due, and each turn sets its own timers
        arrived = {
            cause: at
            for cause, at in state.due.items()
            if cause[0] not in TIMERS and cause[0] is not Cause.RETRY
        }
        if outcome.gone:
            state = self._states[key] = _State()
        state.due, state.began, state.ended = arrived, None, now
        state.failures = {name: state.failures.get(name, 0) + 1 for name in outcome.failures}
        for name, backoff in outcome.failures.items():
            state.due[Cause.RETRY, name] = now + backoff.seconds(state.failures[name])
        for cause, after in outcome.again.items():
            at = now + after
            state.due[cause, ""] = min(at, state.due.get((cause, ""), at))
        if outcome.gone and not state.due:
            del self._states[key]
        else:
            self._schedule(key, state)

    def running(self, *, now: float) -> dict[Key, float]:
        """Return the seconds for which each running turn has run."""
        return {
            key: now - state.began for key, state in self._states.items() if state.began is not None
        }

    def _drop_outdated(self) -> None:
        while self._waiting and self._outdated(*self._waiting[0]):
            heapq.heappop(self._waiting)
        while self._ready:
            rank, ready, key = self._ready[0]
            if not self._outdated(ready, rank, key):
                return
            heapq.heappop(self._ready)

    def _outdated(self, ready: float, rank: float, key: Key) -> bool:
        state = self._states.get(key)
        return state is None or (state.ready, state.rank) != (ready, rank)

    def _schedule(self, key: Key, state: _State) -> None:
        ready = state.ready_at()
        rank = 0.0 if ready is None else state.rank_at(ready)
        if ready is not None and (ready, rank) != (state.ready, state.rank):
            heapq.heappush(self._waiting, (ready, rank, key))
        state.ready, state.rank = ready, rank
