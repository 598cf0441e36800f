"""What a service's loop remembers so that its status can say for how long something has been so.

Losing it costs little: the status holds when the service last got on, and what repeats comes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.apply.contest import Contests
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.reasons import Reason
from vlm_operator.cluster import Manifest
from vlm_operator.names import Role
from vlm_operator.rollout import service_revision
from vlm_operator.status import Failure, Progress, Told, View, examined, follow, reached, restored
from vlm_operator.status.causes import sentence

REFUSED_SECONDS = 10.0  # that one child is refused, three tries, before a person is needed
CONTEST_SECONDS = 600.0  # that another writer may go on before a person is needed
PUT_BACK_SECONDS = 600.0  # that the status tells of a number that was put back


class Tracker:
    """The memory of one service. Its one writer is the service's loop."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._refused: dict[str, float] = {}
        self._fought: dict[tuple[str, str], float] = {}
        self._put_back: dict[Role, tuple[str, float]] = {}

    def progressed(self, status: Manifest, *, now: float) -> float:
        """When the service last got on, as far as known before this turn."""
        if self._progress is None:
            self._progress = restored(status, now=now)
        return self._progress.at

    def failure(self, found: Failure | None, *, now: float) -> Failure | None:
        """Leave a child that was just refused to the next tries: a refusal may pass by itself."""
        if found is None or found.reason != Told.CHILD_REFUSED:
            self._refused.clear()
            return found
        since = self._refused.get(found.message, now)
        self._refused = {found.message: since}
        return dataclasses.replace(found, person=now - since >= REFUSED_SECONDS)

    def view(self, view: View, contests: Contests) -> View:
        """Fill in what only a memory knows."""
        now = view.observed.now
        self._note(view.decisions, now)
        fought = {key: item.field for key, item in contests.items() if item.fought}
        self._fought = {key: self._fought.get(key, now) for key in fought}
        before = self._progress or restored({}, now=now)
        known = examined(dataclasses.replace(view, settled=before.settled))
        revision = service_revision(view.revisions)
        self._progress = follow(before, known, revision=revision, serving=reached(known))
        return dataclasses.replace(
            known,
            stalled_since=self._progress.at,
            settled=self._progress.settled,
            contested=tuple(
                sentence(
                    f"{key[0]} {key[1]}: somebody else keeps changing {fought[key].lstrip('.')}",
                    "stop the other writer",
                )
                for key, since in self._fought.items()
                if now - since >= CONTEST_SECONDS
            ),
            put_back={role: message for role, (message, _) in self._put_back.items()},
        )

    def _note(self, decisions: Mapping[Role, Decision], now: float) -> None:
        for role, decision in decisions.items():
            if decision.reason == Reason.PUT_BACK:
                self._put_back[role] = (decision.message, now)
        self._put_back = {
            role: known
            for role, known in self._put_back.items()
            if now - known[1] < PUT_BACK_SECONDS
        }
