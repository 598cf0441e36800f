"""Decides which service gets the next turn, when and why. Pure: no clock, no I/O.

add(key, cause) ─▶ due times by key ─▶ take() ─▶ one turn ─▶ done(key, outcome)
                         ▲                                          │ timers and retries
                         └──────────────────────────────────────────┘

Causes of one key that are due together start one turn. A key has at most one turn at a time; a
cause that arrives during a turn starts another one. Keys get their turns in the order in which they
become ready.
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
BURST = 10  # turns of one key that events of children may start at once
REFILL_SECONDS = 2.0  # then one such turn per this time


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
"""Causes that others may trigger at any rate. Only they are limited by `BURST`."""


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
        began: when the running turn began; None if there is none.
        paid: when the bucket is full again. Each turn that only events caused adds
            `REFILL_SECONDS`.
        failures: failures in a row of each part.
    """

    due: dict[tuple[Cause, str], float] = dataclasses.field(default_factory=dict)
    ready: float | None = None
    began: float | None = None
    ended: float = float("-inf")
    paid: float = float("-inf")
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def ready_at(self) -> float | None:
        """Return when the next turn may start."""
        if self.began is not None or not self.due:
            return None
        token = self.paid - (BURST - 1) * REFILL_SECONDS
        first = min(
            max(at, token) if cause in LIMITED else at for (cause, _), at in self.due.items()
        )
        return max(first, self.ended + MIN_GAP_SECONDS)


class WorkQueue:
    """The causes of all keys. One event loop writes it. Times are `now` of a monotonic clock."""

    def __init__(self) -> None:
        self._states: dict[Key, _State] = {}
        self._heap: list[tuple[float, Key]] = []  # entries that differ from `ready` are outdated

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
        while self._heap:
            at, key = self._heap[0]
            state = self._states.get(key)
            if state is not None and state.ready == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take(self, *, now: float) -> tuple[Key, frozenset[Cause]] | None:
        """Start the next turn: return its key and its causes; None if no key is ready.

        The caller must call `done` at the end of the turn.
        """
        at = self.ready_at()
        if at is None or at > now:
            return None
        _, key = heapq.heappop(self._heap)
        state = self._states[key]
        causes = frozenset(cause for (cause, _), due in state.due.items() if due <= now)
        state.due = {cause: due for cause, due in state.due.items() if due > now}
        state.ready, state.began = None, now
        if causes <= LIMITED:
            state.paid = max(now, state.paid) + REFILL_SECONDS
        return key, causes

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

    def _schedule(self, key: Key, state: _State) -> None:
        at = state.ready_at()
        if at != state.ready and at is not None:
            heapq.heappush(self._heap, (at, key))
        state.ready = at
