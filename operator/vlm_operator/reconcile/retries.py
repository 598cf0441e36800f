"""When to try again what the API server refused, each thing by itself: the rest of a turn goes on.

A lasting refusal of one child costs one call per backoff; scaling, drains and repair keep their
own pace meanwhile. A changed manifest forgets all: its user may just have fixed it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_operator import pauses
from vlm_operator.status import Failure


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Seconds before the next try: `first` after one failure, then doubled up to `longest`."""

    first: float
    longest: float


CHILD = Backoff(first=2.0, longest=60.0)
TEMPLATE = Backoff(first=10.0, longest=120.0)


@dataclasses.dataclass(frozen=True)
class _Held:
    failure: Failure
    failures: int
    until: float
    wanted: Any


class Retries:
    """What was refused lately, by a name of ours. Its one writer is the loop of one service."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._generation: int | None = None

    def begin(self, generation: int) -> None:
        """Start a turn for a generation of the manifest."""
        if generation != self._generation:
            self._held.clear()
        self._generation = generation

    def held(self, name: str, wanted: Any, *, now: float) -> Failure | None:
        """The failure because of which `name` is not tried now; None if it may be tried.

        `wanted` is what would be sent: another wish than the refused one is tried at once.
        """
        found = self._held.get(name)
        if found is None or found.wanted != wanted or now >= found.until:
            return None
        return found.failure

    def failed(
        self, name: str, wanted: Any, failure: Failure, *, backoff: Backoff, now: float
    ) -> None:
        """Note a refusal."""
        before = self._held.get(name)
        failures = 1 if before is None or before.wanted != wanted else before.failures + 1
        wait = pauses.growing(failures, first=backoff.first, longest=backoff.longest)
        self._held[name] = _Held(failure, failures, now + wait, wanted)

    def succeeded(self, name: str) -> None:
        """Note that `name` was taken."""
        self._held.pop(name, None)
