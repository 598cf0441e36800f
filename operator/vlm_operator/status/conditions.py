"""Conditions, as a list of predicates in reading order. Each names the one thing that blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlm_operator.names import Role
from vlm_operator.status.generation import ready, reconciling, rollout, stalled
from vlm_operator.status.readiness import READY_NAMES, role_ready, roles
from vlm_operator.status.sizing import attainable, capacity, metrics, scaling
from vlm_operator.status.view import Verdict, View

Check = Callable[[View], Verdict | None]


def verdicts(view: View) -> Iterator[Verdict]:
    """Ask every predicate, in reading order."""
    for check in CHECKS:
        found = check(view)
        if found is not None:
            yield found


def accepted(view: View) -> Verdict:
    """Whether the manifest can be met as written."""
    failure = view.failure
    if failure is not None and not failure.accepted:
        return Verdict("Accepted", False, failure.reason, failure.message)
    return Verdict("Accepted", True, "Valid", "the manifest is valid")


def _role_check(role: Role) -> Check:
    def check(view: View) -> Verdict | None:
        return role_ready(view, role) if role in roles(view) else None

    return check


CHECKS: tuple[Check, ...] = (
    ready,
    accepted,
    *(_role_check(role) for role in READY_NAMES),
    scaling,
    metrics,
    capacity,
    attainable,
    rollout,
    reconciling,
    stalled,
)
