"""Ready, and whether the generation is reached: the conditions that kstatus reads, and the rollout.

Stalled      a person is needed: a refusal, a cause past its delay, no progress until the deadline
Reconciling  not stalled, and the generation is not reached yet; never about autoscaling
Ready        every role serves its floor, whatever the other two say
"""

from __future__ import annotations

from vlm_operator.api.status import ConditionType
from vlm_operator.status.causes import Problem, sentence
from vlm_operator.status.progress import deadline_seconds
from vlm_operator.status.readiness import problems, reached, role_ready, roles
from vlm_operator.status.readiness import serving as all_serve
from vlm_operator.status.view import Told, Verdict, View


def ready(view: View) -> Verdict:
    """The summary: True when every role serves, else the first thing that keeps it from that."""
    failure = view.failure
    if failure is not None and failure.reason == Told.DELETING_NAMESPACE:
        return Verdict("Ready", False, failure.reason, failure.message)
    if view.service.spec.suspend:
        if any(not pod.finished for pod in view.observed.pods):
            return Verdict("Ready", False, "Stopping", "spec.suspend is set: pods finish")
        message = "spec.suspend is set: no pod runs and no request is served"
        return Verdict("Ready", True, "Stopped", message)
    for role in roles(view):
        found = role_ready(view, role)
        if not found.status:
            if failure is not None and not view.observed.of(role):
                return Verdict("Ready", False, failure.reason, failure.message)
            return Verdict("Ready", False, found.reason, found.message)
    model = view.service.spec.model.served_name
    return Verdict("Ready", True, "Serving", f"{model} is served at {view.url}")


def rollout(view: View) -> Verdict:
    """Whether the pods are those that the manifest asks for, or on their way."""
    step, failure = view.step, view.failure
    kind: ConditionType = "RolloutProgressing"
    if failure is not None and not failure.accepted:
        return Verdict(kind, False, failure.reason, "the refused manifest is not rolled out")
    if step.back:
        reason = Told.ROLLED_BACK if step.done else Told.ROLLING_BACK
        return Verdict(kind, not step.done, reason, failed(view))
    if view.service.spec.suspend:
        return Verdict(kind, False, "Stopped", "spec.suspend is set")
    if step.failure and not step.done:
        return Verdict(kind, False, Told.DEADLINE_EXCEEDED, failed(view))
    if step.done and (view.settled or reached(view)):
        return Verdict(kind, False, "Complete", "every role serves pods of the newest revision")
    if late(view):
        return Verdict(kind, False, Told.DEADLINE_EXCEEDED, _overdue(view))
    if step.done:
        return Verdict(kind, True, Told.STARTING, ready(view).message)
    if spare := _spare(view):
        return Verdict(kind, True, Told.NO_SPARE, f"{step.waiting}: {spare.message}")
    if step.over_budget:
        return Verdict(kind, True, Told.NO_SPARE, sentence(step.waiting, "raise spec.budget"))
    return Verdict(kind, True, "Progressing", step.waiting)


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
    """Kstatus' word for: on its way to this generation, no person needed."""
    if stalled(view).status:
        return Verdict("Reconciling", False, "Stalled", "a person is needed: see Stalled")
    if view.service.spec.paused:
        return Verdict("Reconciling", False, "Paused", "spec.paused is set")
    failure = view.failure
    if failure is not None:
        return Verdict("Reconciling", True, failure.reason, failure.message)
    if view.service.spec.suspend and not ready(view).status:
        return Verdict("Reconciling", True, "Stopping", ready(view).message)
    if not view.service.spec.suspend and not (view.step.done and (view.settled or reached(view))):
        return Verdict("Reconciling", True, "Progressing", view.step.waiting or ready(view).message)
    return Verdict("Reconciling", False, "Settled", "this generation is reached")


def stalled(view: View) -> Verdict:
    """Kstatus' word for: nothing happens until a person acts."""
    failure = view.failure
    if failure is not None and failure.person:
        return Verdict("Stalled", True, failure.reason, failure.message)
    if view.step.failure and (view.step.done if view.step.back else not view.step.done):
        return Verdict("Stalled", True, "RolloutFailed", failed(view))
    if view.service.spec.paused:
        if view.pending:
            message = sentence("spec.paused is set and the plan differs", "unset spec.paused")
            return Verdict("Stalled", True, "Paused", message)
        return Verdict("Stalled", False, "NotStalled", "nothing waits for a person")
    lasting = lasting_problem(view)
    if lasting is not None:
        return Verdict("Stalled", True, lasting.reason, lasting.message)
    if late(view):
        return Verdict(
            "Stalled",
            True,
            ready(view).reason if not all_serve(view) else Told.DEADLINE_EXCEEDED,
            _overdue(view),
        )
    if view.contested:
        return Verdict("Stalled", True, Told.CHILD_CONTESTED, view.contested[0])
    return Verdict("Stalled", False, "NotStalled", "nothing waits for a person")


def lasting_problem(view: View) -> Problem | None:
    """Return the first problem that has lasted past its delay."""
    if view.service.spec.suspend:
        return None
    now = view.observed.now
    for role in roles(view):
        for problem in problems(view, role):
            if problem.needs_user(now):
                return problem
    return None


def late(view: View) -> bool:
    """Whether the service needs to get on and has not for the deadline."""
    if view.service.spec.suspend or view.service.spec.paused or view.failure is not None:
        return False
    moving = not view.step.done or not view.settled or not all_serve(view)
    if not moving or (view.step.done and reached(view)):
        return False
    return view.observed.now - view.stalled_since >= deadline_seconds(view)


def _overdue(view: View) -> str:
    deadline = view.service.spec.rollout.progress_deadline_seconds
    what = ready(view).message
    if all_serve(view):
        spare = _spare(view)
        what = view.step.waiting + (f": {spare.message}" if spare else "")
    return f"no progress for rollout.progressDeadlineSeconds ({deadline}): {what}"


def _spare(view: View) -> Problem | None:
    """The surge pod that no node has room for."""
    for role in roles(view):
        for problem in problems(view, role):
            if problem.reason in ("Unschedulable", "QuotaExceeded"):
                return problem
    return None
