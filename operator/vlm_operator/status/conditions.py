"""All conditions, as a list of predicates in reading order. Each names one blocking cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlm_operator.names import Role
from vlm_operator.status.generation import ready, reconciling, rollout, stalled
from vlm_operator.status.inputs import ConditionState, StatusInputs
from vlm_operator.status.readiness import READY_NAMES, role_ready, roles
from vlm_operator.status.sizing import attainable, capacity, metrics, scaling

Check = Callable[[StatusInputs], ConditionState | None]


def condition_states(view: StatusInputs) -> Iterator[ConditionState]:
    """Yield the conditions that apply, in reading order."""
    for check in CHECKS:
        found = check(view)
        if found is not None:
            yield found


def accepted(view: StatusInputs) -> ConditionState:
    """Return the condition Accepted: whether the operator can act on the manifest."""
    failure = view.failure
    if failure is not None and not failure.accepted:
        return ConditionState("Accepted", False, failure.reason, failure.message)
    return ConditionState("Accepted", True, "Valid", "the manifest is valid")


def _role_check(role: Role) -> Check:
    def check(view: StatusInputs) -> ConditionState | None:
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
