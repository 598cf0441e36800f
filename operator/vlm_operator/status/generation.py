"""Computes the conditions that kstatus reads, and RolloutProgressing.

Stalled      a user must act: a refusal, a cause past its delay, no progress until the deadline
Reconciling  not stalled, and the generation is not reached yet; independent of autoscaling
Ready        every role serves its floor, independent of the other two
"""

from __future__ import annotations

from vlm_operator.api.status import ConditionType
from vlm_operator.status.causes import Problem, sentence, split
from vlm_operator.status.inputs import ConditionReason, ConditionState, StatusInputs
from vlm_operator.status.progress import deadline_seconds
from vlm_operator.status.readiness import problems, reached, role_ready, roles, where_to_look
from vlm_operator.status.readiness import serving as all_serve


def ready(view: StatusInputs) -> ConditionState:
    """Return Ready: True if every role serves, else False with the first blocking cause."""
    failure = view.failure
    if failure is not None and failure.reason == ConditionReason.DELETING_NAMESPACE:
        return ConditionState("Ready", False, failure.reason, failure.message)
    if view.service.spec.stopped:
        if any(not pod.finished for pod in view.observed.pods):
            return ConditionState("Ready", False, "Stopping", "spec.stopped is set: pods finish")
        message = "spec.stopped is set: no pod runs and no request is served"
        return ConditionState("Ready", True, "Stopped", message)
    for role in roles(view):
        found = role_ready(view, role)
        if not found.status:
            if failure is not None and not view.observed.of(role):
                return ConditionState("Ready", False, failure.reason, failure.message)
            return ConditionState("Ready", False, found.reason, found.message)
    model = view.service.spec.model.served_name
    return ConditionState("Ready", True, "Serving", f"{model} is served at {view.url}")


def rollout(view: StatusInputs) -> ConditionState:
    """Return RolloutProgressing: whether pods of the wanted revisions are still being created."""
    step, failure = view.step, view.failure
    kind: ConditionType = "RolloutProgressing"
    if failure is not None and not failure.accepted:
        return ConditionState(kind, False, failure.reason, "the refused manifest is not rolled out")
    if step.back:
        reason = ConditionReason.ROLLED_BACK if step.done else ConditionReason.ROLLING_BACK
        return ConditionState(kind, not step.done, reason, failed(view))
    if view.service.spec.stopped:
        return ConditionState(kind, False, "Stopped", "spec.stopped is set")
    if step.failure and not step.done:
        return ConditionState(kind, False, ConditionReason.DEADLINE_EXCEEDED, failed(view))
    if step.done and (view.settled or reached(view)):
        return ConditionState(
            kind, False, "Complete", "every role serves pods of the newest revision"
        )
    if late(view):
        return ConditionState(kind, False, ConditionReason.DEADLINE_EXCEEDED, _overdue(view))
    if step.done:
        return ConditionState(kind, True, ConditionReason.STARTING, ready(view).message)
    if spare := _spare(view):
        return ConditionState(
            kind, True, ConditionReason.NO_SPARE, f"{step.waiting}: {spare.message}"
        )
    if step.over_budget:
        return ConditionState(
            kind, True, ConditionReason.NO_SPARE, sentence(step.waiting, "raise spec.budget")
        )
    return ConditionState(kind, True, "Progressing", step.waiting)


def failed(view: StatusInputs) -> str:
    """Return a message about the failed pod, its cause and the state of the rollout."""
    step = view.step
    if not step.back:
        stays = "the rollout stays where it is until the pod is ready or spec changes"
        known = (item for role in roles(view) for item in problems(view, role))
        fix = next((item.fix for item in known if f"{item.subject} " in step.failure), "")
        return sentence(f"{step.failure}; {stays}", fix or where_to_look(view))
    after = "is served again" if step.done else f"comes back: {step.waiting}"
    return f"{step.failure}; the revision before {after}. It is not tried again until spec changes"


def reconciling(view: StatusInputs) -> ConditionState:
    """Return Reconciling: the generation is not reached, and no user needs to act."""
    if stalled(view).status:
        return ConditionState("Reconciling", False, "Stalled", "a person is needed: see Stalled")
    if view.service.spec.paused:
        return ConditionState("Reconciling", False, "Paused", "spec.paused is set")
    failure = view.failure
    if failure is not None:
        return ConditionState("Reconciling", True, failure.reason, failure.message)
    if view.service.spec.stopped and not ready(view).status:
        return ConditionState("Reconciling", True, "Stopping", ready(view).message)
    if not view.service.spec.stopped and not (view.step.done and (view.settled or reached(view))):
        return ConditionState(
            "Reconciling", True, "Progressing", view.step.waiting or ready(view).message
        )
    return ConditionState("Reconciling", False, "Settled", "this generation is reached")


def stalled(view: StatusInputs) -> ConditionState:
    """Return Stalled: there is no progress until a user acts."""
    failure = view.failure
    if failure is not None and failure.needs_user_action:
        return ConditionState("Stalled", True, failure.reason, failure.message)
    if view.step.failure and (view.step.done if view.step.back else not view.step.done):
        return ConditionState("Stalled", True, "RolloutFailed", failed(view))
    if view.service.spec.paused:
        if view.pending:
            message = sentence("spec.paused is set and the plan differs", "unset spec.paused")
            return ConditionState("Stalled", True, "Paused", message)
        return ConditionState("Stalled", False, "NotStalled", "nothing waits for a person")
    lasting = lasting_problem(view)
    if lasting is not None:
        return ConditionState("Stalled", True, lasting.reason, lasting.message)
    if late(view):
        return ConditionState(
            "Stalled",
            True,
            ready(view).reason if not all_serve(view) else ConditionReason.DEADLINE_EXCEEDED,
            _overdue(view),
        )
    if view.newly_contested:
        return ConditionState(
            "Stalled", True, ConditionReason.CHILD_CONTESTED, view.newly_contested[0]
        )
    return ConditionState("Stalled", False, "NotStalled", "nothing waits for a person")


def lasting_problem(view: StatusInputs) -> Problem | None:
    """Return the first problem that has lasted past its delay; None if there is none."""
    if view.service.spec.stopped:
        return None
    now = view.observed.now
    for role in roles(view):
        for problem in problems(view, role):
            if problem.needs_user(now):
                return problem
    return None


def late(view: StatusInputs) -> bool:
    """Whether the generation is not reached, and there was no progress for the deadline."""
    if view.service.spec.stopped or view.service.spec.paused or view.failure is not None:
        return False
    moving = not view.step.done or not view.settled or not all_serve(view)
    if not moving or (view.step.done and reached(view)):
        return False
    return view.observed.now - view.stalled_since >= deadline_seconds(view)


def _overdue(view: StatusInputs) -> str:
    deadline = view.service.spec.rollout.progress_deadline_seconds
    what = ready(view).message
    if all_serve(view):
        spare = _spare(view)
        what = view.step.waiting + (f": {spare.message}" if spare else "")
    fix = "" if split(what)[1] else where_to_look(view)
    return sentence(f"no progress for rollout.progressDeadlineSeconds ({deadline}): {what}", fix)


def _spare(view: StatusInputs) -> Problem | None:
    """Return the problem of a pod that no node or quota can take; None if there is none."""
    for role in roles(view):
        for problem in problems(view, role):
            if problem.reason in ("Unschedulable", "QuotaExceeded"):
                return problem
    return None
