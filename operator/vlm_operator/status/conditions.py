"""Computes all conditions of a VLMService. Each names one blocking cause.

Accepted       the operator can act on the manifest
<role>Ready    `readiness.py`
ScalingActive, MetricsAvailable, CapacitySufficient, SLOAttainable    sizes and load
kstatus reads:
Stalled        a user must act: a refusal, a cause past its delay, no progress until the deadline
Reconciling    not stalled, and the generation is not reached yet; independent of autoscaling
Ready          every role serves its floor, independent of the other two
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from typing import Any

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.api.status import ConditionType
from vlm_operator.autoscale.explain import beyond, remedy
from vlm_operator.autoscale.outcome import Attribution, Bound, Reason
from vlm_operator.cluster import timestamp
from vlm_operator.names import Role
from vlm_operator.state import Manifest
from vlm_operator.status.causes import Problem, sentence, split
from vlm_operator.status.inputs import ConditionReason, ConditionState, StatusInputs
from vlm_operator.status.progress import deadline_seconds
from vlm_operator.status.readiness import (
    READY_NAMES,
    problems,
    reached,
    role_ready,
    roles,
    where_to_look,
)
from vlm_operator.status.readiness import serving as all_serve

NOT_STALLED = ConditionState("Stalled", False, "NotStalled", "nothing needs a user")
SEE_STALLED = ConditionState("Reconciling", False, "Stalled", "a user must act: see Stalled")
# Bounds that limit a pool for longer than a window, in words that do not change between ticks.
_LASTING: dict[str, str] = {
    Bound.MAX: "maxReplicas",
    Bound.BUDGET: "the budget",
    Bound.CAPACITY: "node types that give no node or are at their own maxReplicas",
    Bound.POOL_RATIO: "the ratio to another pool",
}


def condition_states(view: StatusInputs) -> Iterator[ConditionState]:
    """Yield the conditions that apply, in reading order."""
    yield ready(view)
    yield accepted(view)
    yield from (role_ready(view, role) for role in READY_NAMES if role in roles(view))
    yield scaling(view)
    yield metrics(view)
    yield capacity(view)
    if (slo := attainable(view)) is not None:
        yield slo
    yield rollout(view)
    yield reconciling(view)
    yield stalled(view)


def with_times(
    states: Iterable[ConditionState],
    previous: Manifest,
    *,
    generation: int | None = None,
    now: float,
) -> list[dict[str, Any]]:
    """Return conditions with `lastTransitionTime`, the time at which their status last changed.

    Messages are cut at 1024 characters.

    Args:
        states: conditions without their times.
        previous: the present status.
        generation: generation of the manifest that the conditions are about, if they say it.
        now: seconds since the epoch.
    """
    known = {item["type"]: item for item in previous.get("conditions", [])}
    found = []
    for state in states:
        status = {True: "True", False: "False", None: "Unknown"}[state.status]
        before = known.get(state.type)
        same = before is not None and before["status"] == status
        condition = {
            "type": state.type,
            "status": status,
            "reason": state.reason,
            "message": state.message[:1024],
            "lastTransitionTime": before["lastTransitionTime"]
            if before and same
            else timestamp(now),
        }
        if generation is not None:
            condition["observedGeneration"] = generation
        found.append(condition)
    return found


def accepted(view: StatusInputs) -> ConditionState:
    """Return the condition Accepted: whether the operator can act on the manifest."""
    failure = view.failure
    if failure is not None and not failure.accepted:
        return ConditionState("Accepted", False, failure.reason, failure.message)
    return ConditionState("Accepted", True, "Valid", "the manifest is valid")


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
    after = "serves again" if step.done else f"is being restored: {step.waiting}"
    return f"{step.failure}; the revision before {after}. It is not tried again until spec changes"


def reconciling(view: StatusInputs) -> ConditionState:
    """Return Reconciling: the generation is not reached, and no user needs to act."""
    if stalled(view).status:
        return SEE_STALLED
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
        return NOT_STALLED
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
    return NOT_STALLED


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


def scaling(view: StatusInputs) -> ConditionState:
    """Return ScalingActive: who decides the pools' sizes, and what prevents or limits scaling."""
    spec = view.service.spec
    modes = {role: pool.scaling.mode for role, pool in spec.pools.present.items()}
    if spec.stopped:
        return ConditionState("ScalingActive", False, "Stopped", "spec.stopped is set")
    if spec.paused:
        return ConditionState("ScalingActive", False, "Paused", "spec.paused is set")
    for role, decision in view.decisions.items():
        if decision.conflict:
            message = f"{role}: {decision.message}"
            return ConditionState("ScalingActive", False, Reason.SCALING_CONFLICT, message)
    for message in view.put_back.values():
        return ConditionState("ScalingActive", False, Reason.SCALING_CONFLICT, message)
    policy = view.policy.apply
    if policy is not AutoscalingPolicy.ACTIVE and ScalingMode.AUTO in modes.values():
        message = {
            AutoscalingPolicy.OFF: "autoscaling.policy is Off: pools stay as they are",
            AutoscalingPolicy.ADVISORY: "autoscaling.policy is Advisory: "
            "status.pools.*.recommendation says what would be done",
        }[policy]
        return ConditionState("ScalingActive", False, policy.value, message)
    limited = next((said for role in modes if (said := _limit(view, role))), "")
    if limited:
        return ConditionState("ScalingActive", True, ConditionReason.LIMITED, limited)
    listed = ", ".join(f"{role} {mode.value}" for role, mode in modes.items())
    automatic = any(mode is not ScalingMode.MANUAL for mode in modes.values())
    return ConditionState("ScalingActive", True, "Scaling" if automatic else "Manual", listed)


def _limit(view: StatusInputs, role: Role) -> str:
    """Return why a pool is smaller or larger than its load needs; "" if it is not limited."""
    decision = view.decisions.get(role)
    if decision is None or decision.limited_by is None:
        return ""
    if decision.limited_by == Bound.BUDGET_UNREADABLE:
        return f"{role}: nothing grows, the budget cannot be kept: {view.policy.budget.unreadable}"
    if view.policy.pools[role].mode is ScalingMode.EXTERNAL:
        return f"{role}: {decision.message}"
    word = _LASTING.get(decision.limited_by)
    return f"{role} is held at {decision.to} by {word}" if word else ""


def metrics(view: StatusInputs) -> ConditionState:
    """Return MetricsAvailable: whether serving pods answer to /stats.

    A pod is silent only after `stale_ticks` ticks without an answer.
    """
    asked = [pod for role in roles(view) for pod in view.serving(role)]
    answers, unschedulable_timeout = (
        view.outcome.memory.estimate.answers,
        view.policy.constants.stale_ticks * view.policy.interval_seconds,
    )
    heard = {
        uid for uid, last in answers.items() if view.observed.now - last.at <= unschedulable_timeout
    }
    if not asked:
        return ConditionState("MetricsAvailable", None, "NoPods", "no pod is ready yet")
    absurd = set(view.outcome.estimate.absurd)
    known = heard | view.observed.samples.keys() - absurd
    strange = [pod.name for pod in asked if pod.uid in absurd - heard]
    if strange:
        message = (
            f"{len(strange)} of {len(asked)} pods answer to /stats with impossible numbers, "
            f"first {strange[0]}: they count as silent; delete the pod and report it"
        )
        return ConditionState("MetricsAvailable", False, "ReportsInvalid", message)
    silent = [pod.name for pod in asked if pod.uid not in known]
    if silent:
        message = f"{len(silent)} of {len(asked)} pods do not answer to /stats, first {silent[0]}"
        return ConditionState("MetricsAvailable", False, "PodsSilent", message)
    held = [role for role, item in view.decisions.items() if item.held and view.serving(role)]
    if held and view.outcome.estimate.missing_seconds > unschedulable_timeout:
        message = f"{held[0]}: its pods do not say enough to decide on, so nothing changes"
        return ConditionState("MetricsAvailable", False, "TooLittleKnown", message)
    return ConditionState(
        "MetricsAvailable", True, "AllAnswer", f"{len(asked)} pods answer to /stats"
    )


def capacity(view: StatusInputs) -> ConditionState:
    """Return CapacitySufficient: whether every pod has a node."""
    for role in roles(view):
        for problem in view.problems.get(role, ()):
            if problem.reason in ("Unschedulable", "QuotaExceeded"):
                message = f"{role}: {problem.message}"
                return ConditionState("CapacitySufficient", False, problem.reason, message)
    for role, pace in view.outcome.memory.pace.pools.items():
        for name, item in sorted(pace.exhausted.items()):
            if view.observed.now < item.until:
                again = datetime.datetime.fromtimestamp(item.until, datetime.UTC)
                message = (
                    f"{role}: variant {name} {item.what}, not tried again before {again:%H:%M} UTC"
                )
                return ConditionState("CapacitySufficient", False, "Exhausted", message)
    pods = [pod for role in roles(view) for pod in view.observed.of(role)]
    if not pods:
        return ConditionState("CapacitySufficient", None, "NoPods", "no pod exists")
    waiting = next((pod for pod in pods if pod.pending), None)
    if waiting is not None:
        message = f"{waiting.role}: pod {waiting.name} waits for a node"
        return ConditionState("CapacitySufficient", None, "Pending", message)
    return ConditionState("CapacitySufficient", True, "AllScheduled", "every pod has a node")


def attainable(view: StatusInputs) -> ConditionState | None:
    """Return SLOAttainable: whether TTFT is within its goal; None if there is no goal."""
    if not view.policy.ttft_seconds:
        return None
    aimed = [item for item in view.slo if item.target_seconds is not None]
    for item in aimed:
        if not item.attainable:
            message = f"{item.modality}: {beyond(item)}"
            return ConditionState("SLOAttainable", False, Reason.UNATTAINABLE, message)
    if not aimed:
        return ConditionState(
            "SLOAttainable", None, "NoRequests", "no request ended within the window"
        )
    for item in aimed:
        if item.overrun_seconds > 0:
            stage = item.dominant_stage or "unknown"
            message = (
                f"{item.modality}: TTFT p95 exceeds the goal of {_target(item)} ms, most of it "
                f"goes to {stage}; {remedy(stage)} would help"
            )
            return ConditionState("SLOAttainable", None, "GoalMissed", message)
    goals = ", ".join(f"{item.modality} {_target(item)} ms" for item in aimed)
    return ConditionState("SLOAttainable", True, "GoalMet", f"TTFT p95 is within its goal: {goals}")


def _target(item: Attribution) -> int:
    return round(1000 * (item.target_seconds or 0.0))
