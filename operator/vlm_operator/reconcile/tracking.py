"""Remembers since when a service makes no progress, or other writers change its children.

If a process loses this memory, `status` still has the time of the last progress. Other writers are
found again when they repeat their change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.apply.sync_state import WriteConflicts
from vlm_operator.autoscale.outcome import Decision, Reason
from vlm_operator.cluster import Manifest
from vlm_operator.names import Role
from vlm_operator.rollout.revisions import service_revision
from vlm_operator.status.causes import sentence
from vlm_operator.status.inputs import StatusInputs
from vlm_operator.status.progress import Progress, restored, update_progress
from vlm_operator.status.readiness import examined, reached

CONTEST_SECONDS = 600.0  # another writer that continues for longer needs a user
PUT_BACK_SECONDS = 600.0  # the status reports a restored replica count for this long


class Tracker:
    """The memory of one service. Its one writer is the service's loop."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._fought: dict[tuple[str, str], float] = {}
        self._put_back: dict[Role, tuple[str, float]] = {}

    def progressed(self, status: Manifest, *, now: float) -> float:
        """Return when the service last made progress before this turn, in epoch seconds."""
        if self._progress is None:
            self._progress = restored(status, now=now)
        return self._progress.at

    def view(self, view: StatusInputs, write_conflicts: WriteConflicts) -> StatusInputs:
        """Return the view with problems, progress, lasting write conflicts and restored counts."""
        now = view.observed.now
        self._note(view.decisions, now)
        contested = {key: item.field for key, item in write_conflicts.items() if item.contested}
        self._fought = {key: self._fought.get(key, now) for key in contested}
        before = self._progress or restored({}, now=now)
        view = examined(dataclasses.replace(view, settled=before.settled))
        revision = service_revision(view.revisions)
        self._progress = update_progress(before, view, revision=revision, serving=reached(view))
        return dataclasses.replace(
            view,
            stalled_since=self._progress.at,
            settled=self._progress.settled,
            newly_contested=tuple(
                sentence(
                    f"{key[0]} {key[1]}: another writer keeps changing "
                    f"{contested[key].lstrip('.')}",
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
            role: (message, since)
            for role, (message, since) in self._put_back.items()
            if now - since < PUT_BACK_SECONDS
        }
