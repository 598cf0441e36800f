"""Conditions, as a list of predicates in reading order. Each names the one thing that blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlm_operator.names import Role
from vlm_operator.status.readiness import READY_NAMES, role_ready, roles
from vlm_operator.status.sizing import attainable, capacity, metrics, scaling
from vlm_operator.status.view import Told, Verdict, View

Check = Callable[[View], Verdict | None]


def verdicts(view: View) -> Iterator[Verdict]:
    """Ask every predicate, in reading order."""
    for check in CHECKS:
        found = check(view)
        if found is not None:
            yield found


def ready(view: View) -> Verdict:
    """The summary: True when every role serves, else the first thing that keeps it from that."""
    if view.failure is not None:
        return Verdict("Ready", False, view.failure.reason, view.failure.message)
    if view.service.spec.suspend:
        return Verdict("Ready", False, "Suspended", "spec.suspend is set: all pools are at 0")
    for role in roles(view):
        found = role_ready(view, role)
        if not found.status:
            return Verdict("Ready", False, found.reason, found.message)
    model = view.service.spec.model.served_name
    return Verdict("Ready", True, "Serving", f"{model} is served at {view.url}")


def accepted(view: View) -> Verdict:
    """Whether the manifest can be met as written."""
    failure = view.failure
    if failure is not None and not failure.accepted:
        return Verdict("Accepted", False, failure.reason, failure.message)
    return Verdict("Accepted", True, "Valid", "the manifest is valid")


def rollout(view: View) -> Verdict:
    """Whether pods of an older revision are still there, and on their way."""
    step = view.step
    if step.back:
        reason = Told.ROLLED_BACK if step.done else "RollingBack"
        return Verdict("RolloutProgressing", not step.done, reason, failed(view))
    if step.done:
        return Verdict("RolloutProgressing", False, "Complete", "all pods are of one revision")
    if step.failure:
        return Verdict("RolloutProgressing", False, Told.DEADLINE_EXCEEDED, failed(view))
    return Verdict("RolloutProgressing", True, "Progressing", step.waiting)


def failed(view: View) -> str:
    """Which pod failed and why, and what became of the rollout."""
    step = view.step
    if not step.back:
        return (
            f"{step.failure}; the rollout stays where it is until the pod is ready or spec changes"
        )
    after = "is served again" if step.done else f"comes back: {step.waiting}"
    return f"{step.failure}; the revision before {after}. It is not tried again until spec changes"


def reconciling(view: View) -> Verdict:
    """Kstatus' word for: on its way, no person needed."""
    stuck = (view.failure is not None and view.failure.person) or stalled(view).status
    moving = not stuck and not ready(view).status and not view.service.spec.suspend
    if moving or not (stuck or view.step.done):
        message = view.step.waiting or ready(view).message
        return Verdict("Reconciling", True, "Progressing", message)
    return Verdict("Reconciling", False, "Settled", "nothing is left to do")


def stalled(view: View) -> Verdict:
    """Kstatus' word for: nothing happens until a person acts."""
    failure = view.failure
    if failure is not None and failure.person and failure.accepted:
        return Verdict("Stalled", True, failure.reason, failure.message)
    if view.step.failure and (view.step.back or not view.step.done):
        return Verdict("Stalled", True, "RolloutFailed", failed(view))
    return Verdict("Stalled", False, "NotStalled", "no person is needed")


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
