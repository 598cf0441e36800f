"""Decides when to retry each write that the API server refused; the rest of a turn continues.

A lasting refusal of one child costs one call per backoff. Scaling, drains and repair are not
delayed. A new generation of the manifest clears all backoffs, because it may fix the cause.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_operator.backoff import Backoff
from vlm_operator.status.inputs import Failure

REFUSALS = 3  # refusals of one child in a row after which a user must act
CHILD = Backoff(first=2.0, longest=60.0)
TEMPLATE = Backoff(first=10.0, longest=120.0)


@dataclasses.dataclass(frozen=True)
class _Held:
    failure: Failure
    failures: int
    until: float
    wanted: Any


class Retries:
    """Recent refusals by label of the write. Its one writer is the loop of one service."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._generation: int | None = None

    def begin(self, generation: int) -> None:
        """Start a turn; a new generation of the manifest clears all refusals."""
        if generation != self._generation:
            self._held.clear()
        self._generation = generation

    def held(self, name: str, wanted: Any, *, now: float) -> Failure | None:
        """Return the failure that delays `name`; None if it may be tried now.

        `wanted` is the content to send. If it differs from the refused content, it is tried now.
        """
        refusal = self._held.get(name)
        if refusal is None or refusal.wanted != wanted or now >= refusal.until:
            return None
        return refusal.failure

    def failed(
        self, name: str, wanted: Any, failure: Failure, *, backoff: Backoff, now: float
    ) -> None:
        """Record a refusal of `wanted`, and delay the next try by `backoff`."""
        failures = 1 + self._failures(name, wanted)
        wait = backoff.seconds(failures)
        self._held[name] = _Held(failure, failures, now + wait, wanted)

    def refused(self, name: str, wanted: Any, failure: Failure, *, now: float) -> Failure:
        """Record a child's refusal; returns the failure, which says whether a user must act.

        A refusal may end without a user, so only `REFUSALS` in a row need one.
        """
        needs_user_action = 1 + self._failures(name, wanted) >= REFUSALS
        found = dataclasses.replace(failure, needs_user_action=needs_user_action)
        self.failed(name, wanted, found, backoff=CHILD, now=now)
        return found

    def succeeded(self, name: str) -> None:
        """Record that the API server accepted `name`."""
        self._held.pop(name, None)

    def _failures(self, name: str, wanted: Any) -> int:
        """Return how often this same content was refused in a row."""
        before = self._held.get(name)
        return 0 if before is None or before.wanted != wanted else before.failures
