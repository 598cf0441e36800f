"""Computes all conditions of a VLMService. Each names one blocking cause.

Accepted       the operator can act on the manifest
<role>Ready    `readiness.py`
ModelReady     `model.py`
ScalingActive, MetricsAvailable, CapacitySufficient, SLOAttainable    sizes and load
kstatus reads:
Stalled        a user must act: a refusal, a cause past its delay, no progress until the deadline
Reconciling    not stalled, and the generation is not reached yet; independent of autoscaling
Ready          every role serves its floor, independent of the other two
"""

from __future__ import annotations

import datetime
import functools
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
from vlm_operator.state.identities import first_to_expire
from vlm_operator.status.causes import Problem, sentence, split
from vlm_operator.status.inputs import ConditionReason, ConditionState, StatusInputs
from vlm_operator.status.model import download_problem, model_ready
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
    if (model := model_ready(view)) is not None:
        yield model
    if (issued := certificates(view)) is not None:
        yield issued
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

    Messages are cut at 1024 characters. `generation` is the one that the conditions are about, if
    they say it.
    """
    before = {item["type"]: item for item in previous.get("conditions", [])}
    conditions = []
    for state in states:
        status = {True: "True", False: "False", None: "Unknown"}[state.status]
        old = before.get(state.type, {})
        condition = {
            "type": state.type,
            "status": status,
            "reason": state.reason,
            "message": state.message[:1024],
            "lastTransitionTime": old["lastTransitionTime"]
            if old.get("status") == status
            else timestamp(now),
        }
        if generation is not None:
            condition["observedGeneration"] = generation
        conditions.append(condition)
    return conditions


def accepted(view: StatusInputs) -> ConditionState:
    failure = view.failure
    if failure is not None and not failure.accepted:
        return ConditionState("Accepted", False, failure.reason, failure.message)
    return ConditionState("Accepted", True, "Valid", "the manifest is valid")


def ready(view: StatusInputs) -> ConditionState:
    """Return Ready: True if every role serves, else False with the first blocking cause."""
    state = functools.partial(ConditionState, "Ready")
    failure = view.failure
    if failure is not None and failure.reason == ConditionReason.DELETING_NAMESPACE:
        return state(False, failure.reason, failure.message)
    if view.service.spec.stopped:
        if any(not pod.finished for pod in view.observed.pods):
            return state(False, "Stopping", "spec.stopped is set: pods finish")
        message = "spec.stopped is set: no pod runs and no request is served"
        return state(True, "Stopped", message)
    for role in roles(view):
        state_of_role = role_ready(view, role)
        if not state_of_role.status:
            if failure is not None and not view.observed.of(role):
                return state(False, failure.reason, failure.message)
            if state_of_role.reason == ConditionReason.WAITS_FOR_MODEL:
                return waits_for_model(view, "Ready", status=False)
            if view.sleep_state == "waking" and view.settled and not problems(view, role):
                message = f"the service starts from zero: {state_of_role.message}"
                return state(False, ConditionReason.WAKING, message)
            return state(False, state_of_role.reason, state_of_role.message)
    model = view.service.spec.model.served_name
    if asleep(view):
        return state(True, Reason.SCALED_TO_ZERO, _sleeps(view))
    return state(True, "Serving", f"{model} is served at {view.url}")


def asleep(view: StatusInputs) -> bool:
    """Whether the whole service is at zero until a request comes."""
    return view.sleep_state in ("falling", "asleep") and not any(view.desired.values())


def _sleeps(view: StatusInputs) -> str:
    memory = view.outcome.memory.pace.sleep
    assert memory is not None
    since = datetime.datetime.fromtimestamp(memory.since, datetime.UTC)
    return (
        f"all pools are at zero since {since:%Y-%m-%d %H:%M:%S} UTC, because no request came; "
        f"a request at {view.url} starts them and waits for its answer"
    )


def rollout(view: StatusInputs) -> ConditionState:
    """Return RolloutProgressing: whether pods of the wanted revisions are still being created."""
    step, failure = view.step, view.failure
    state = functools.partial(ConditionState, "RolloutProgressing")
    if failure is not None and not failure.accepted:
        return state(False, failure.reason, "the refused manifest is not rolled out")
    if step.back:
        reason = ConditionReason.ROLLED_BACK if step.done else ConditionReason.ROLLING_BACK
        return state(not step.done, reason, failed(view))
    if view.service.spec.stopped:
        return state(False, "Stopped", "spec.stopped is set")
    if step.failure and not step.done:
        return state(False, ConditionReason.DEADLINE_EXCEEDED, failed(view))
    if view.held and not late(view):
        return waits_for_model(view, "RolloutProgressing", status=True)
    if step.done and (view.settled or reached(view)):
        return state(False, "Complete", "every role serves pods of the newest revision")
    if late(view):
        return state(False, ConditionReason.DEADLINE_EXCEEDED, _overdue(view))
    if step.done:
        return state(True, ConditionReason.STARTING, ready(view).message)
    if spare := _spare(view):
        return state(True, ConditionReason.NO_SPARE, f"{step.waiting}: {spare.message}")
    if step.over_budget:
        return state(True, ConditionReason.NO_SPARE, sentence(step.waiting, "raise spec.budget"))
    return state(True, "Progressing", step.waiting)


def waits_for_model(
    view: StatusInputs, kind: ConditionType, *, status: bool | None
) -> ConditionState:
    """Return a condition whose cause is the download of the model."""
    model = model_ready(view)
    assert model is not None, "only the download of a model holds a rollout"
    message = f"waits for the model: {model.message}"
    return ConditionState(kind, status, ConditionReason.WAITS_FOR_MODEL, message)


def failed(view: StatusInputs) -> str:
    """Return a message about the failed pod, its cause and the state of the rollout."""
    step = view.step
    if not step.back:
        stays = "the rollout stays where it is until the pod is ready or spec changes"
        all_problems = (item for role in roles(view) for item in problems(view, role))
        fix = next((item.fix for item in all_problems if f"{item.subject} " in step.failure), "")
        return sentence(f"{step.failure}; {stays}", fix or where_to_look(view))
    after = "serves again" if step.done else f"is being restored: {step.waiting}"
    return f"{step.failure}; the revision before {after}. It is not tried again until spec changes"


def reconciling(view: StatusInputs) -> ConditionState:
    """Return Reconciling: the generation is not reached, and no user needs to act."""
    state = functools.partial(ConditionState, "Reconciling")
    if stalled(view).status:
        return SEE_STALLED
    if view.service.spec.paused:
        return state(False, "Paused", "spec.paused is set")
    failure = view.failure
    if failure is not None:
        return state(True, failure.reason, failure.message)
    if view.service.spec.stopped and not ready(view).status:
        return state(True, "Stopping", ready(view).message)
    if view.held and not view.service.spec.stopped:
        return waits_for_model(view, "Reconciling", status=True)
    if not view.service.spec.stopped and not (view.step.done and (view.settled or reached(view))):
        return state(True, "Progressing", view.step.waiting or ready(view).message)
    return state(False, "Settled", "this generation is reached")


def stalled(view: StatusInputs) -> ConditionState:
    """Return Stalled: there is no progress until a user acts."""
    state = functools.partial(ConditionState, "Stalled")
    failure = view.failure
    if failure is not None and failure.needs_user_action:
        return state(True, failure.reason, failure.message)
    if view.step.failure and (view.step.done if view.step.back else not view.step.done):
        return state(True, "RolloutFailed", failed(view))
    if view.service.spec.paused:
        if view.pending:
            message = sentence("spec.paused is set and the plan differs", "unset spec.paused")
            return state(True, "Paused", message)
        return NOT_STALLED
    download = download_problem(view)
    if download is not None and download.needs_user(view.observed.now):
        return state(True, download.reason, download.message)
    lasting = lasting_problem(view)
    if lasting is not None:
        return state(True, lasting.reason, lasting.message)
    if late(view):
        return state(
            True,
            ready(view).reason if not all_serve(view) else ConditionReason.DEADLINE_EXCEEDED,
            _overdue(view),
        )
    if view.newly_contested:
        return state(True, ConditionReason.CHILD_CONTESTED, view.newly_contested[0])
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
    if view.held:
        what = waits_for_model(view, "Stalled", status=True).message
    elif all_serve(view):
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
    state = functools.partial(ConditionState, "ScalingActive")
    spec = view.service.spec
    modes = {role: pool.scaling.mode for role, pool in spec.pools.present.items()}
    if spec.stopped:
        return state(False, "Stopped", "spec.stopped is set")
    if spec.paused:
        return state(False, "Paused", "spec.paused is set")
    for role, decision in view.decisions.items():
        if decision.conflict:
            message = f"{role}: {decision.message}"
            return state(False, Reason.SCALING_CONFLICT, message)
    for message in view.put_back.values():
        return state(False, Reason.SCALING_CONFLICT, message)
    policy = view.policy.apply
    if policy is not AutoscalingPolicy.ACTIVE and ScalingMode.AUTO in modes.values():
        message = {
            AutoscalingPolicy.OFF: "autoscaling.policy is Off: pools stay as they are",
            AutoscalingPolicy.ADVISORY: "autoscaling.policy is Advisory: "
            "status.pools.*.recommendation says what would be done",
        }[policy]
        return state(False, policy.value, message)
    limited = next((limit for role in modes if (limit := _limit(view, role))), "")
    if limited:
        return state(True, ConditionReason.LIMITED, limited)
    listed = ", ".join(f"{role} {mode.value}" for role, mode in modes.items())
    automatic = any(mode is not ScalingMode.MANUAL for mode in modes.values())
    return state(True, "Scaling" if automatic else "Manual", listed)


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
    state = functools.partial(ConditionState, "MetricsAvailable")
    asked = [pod for role in roles(view) for pod in view.serving(role)]
    answers = view.outcome.memory.estimate.answers
    silence = view.policy.constants.stale_ticks * view.policy.interval_seconds
    heard = {uid for uid, last in answers.items() if view.observed.now - last.at <= silence}
    if not asked:
        return state(None, "NoPods", "no pod is ready yet")
    absurd = set(view.outcome.estimate.absurd)
    answered = heard | view.observed.samples.keys() - absurd
    invalid = [pod.name for pod in asked if pod.uid in absurd - heard]
    if invalid:
        message = (
            f"{len(invalid)} of {len(asked)} pods answer to /stats with impossible numbers, "
            f"first {invalid[0]}: they count as silent; delete the pod and report it"
        )
        return state(False, "ReportsInvalid", message)
    silent = [pod.name for pod in asked if pod.uid not in answered]
    if silent:
        message = f"{len(silent)} of {len(asked)} pods do not answer to /stats, first {silent[0]}"
        return state(False, "PodsSilent", message)
    held = [role for role, item in view.decisions.items() if item.held and view.serving(role)]
    if held and view.outcome.estimate.missing_seconds > silence:
        message = f"{held[0]}: its pods do not say enough to decide on, so nothing changes"
        return state(False, "TooLittleKnown", message)
    return state(True, "AllAnswer", f"{len(asked)} pods answer to /stats")


def capacity(view: StatusInputs) -> ConditionState:
    """Return CapacitySufficient: whether every pod has a node."""
    state = functools.partial(ConditionState, "CapacitySufficient")
    for role in roles(view):
        for problem in view.problems.get(role, ()):
            if problem.reason in ("Unschedulable", "QuotaExceeded"):
                message = f"{role}: {problem.message}"
                return state(False, problem.reason, message)
    for role, pace in view.outcome.memory.pace.pools.items():
        for name, item in sorted(pace.exhausted.items()):
            if view.observed.now < item.until:
                again = datetime.datetime.fromtimestamp(item.until, datetime.UTC)
                message = (
                    f"{role}: variant {name} {item.what}, not tried again before {again:%H:%M} UTC"
                )
                return state(False, "Exhausted", message)
    pods = [pod for role in roles(view) for pod in view.observed.of(role)]
    if not pods:
        return state(None, "NoPods", "no pod exists")
    waiting = next((pod for pod in pods if pod.pending), None)
    if waiting is not None:
        message = f"{waiting.role}: pod {waiting.name} waits for a node"
        return state(None, "Pending", message)
    return state(True, "AllScheduled", "every pod has a node")


def certificates(view: StatusInputs) -> ConditionState | None:
    """Return CertificatesReady: whether every role has a certificate; None without certificates."""
    identity = view.identity
    state = functools.partial(ConditionState, "CertificatesReady")
    first = first_to_expire(identity.certificates)
    expiry = "" if first is None else f"{first.secret} expires {timestamp(first.not_after)}"
    if first is not None and first.not_after <= view.observed.now:
        cause = "; ".join(identity.failures.values()) or "the operator did not renew it"
        message = f"{expiry.replace('expires', 'expired')}: pods refuse each other: {cause}"
        return state(False, "Expired", message)
    if identity.failures:
        secret, cause = next(iter(identity.failures.items()))
        until = f"; of the present ones, {expiry}" if expiry else ""
        return state(False, "IssuingFailed", f"{secret}: {cause}{until}")
    if identity.pending:
        listed = ", ".join(identity.pending)
        return state(None, "Pending", f"cert-manager has not issued {listed}")
    if first is None:
        return None
    return state(True, "Issued", f"{len(identity.certificates)} certificates, of which {expiry}")


def attainable(view: StatusInputs) -> ConditionState | None:
    """Return SLOAttainable: whether TTFT is within its goal; None if there is no goal."""
    state = functools.partial(ConditionState, "SLOAttainable")
    if not view.policy.ttft_seconds:
        return None
    aimed = [item for item in view.slo if item.target_seconds is not None]
    for item in aimed:
        if not item.attainable:
            message = f"{item.modality}: {beyond(item)}"
            return state(False, Reason.UNATTAINABLE, message)
    if not aimed:
        return state(None, "NoRequests", "no request ended within the window")
    for item in aimed:
        if item.overrun_seconds > 0:
            stage = item.dominant_stage or "unknown"
            message = (
                f"{item.modality}: TTFT p95 exceeds the goal of {_target(item)} ms, most of it "
                f"goes to {stage}; {remedy(stage)} would help"
            )
            return state(None, "GoalMissed", message)
    goals = ", ".join(f"{item.modality} {_target(item)} ms" for item in aimed)
    return state(True, "GoalMet", f"TTFT p95 is within its goal: {goals}")


def _target(item: Attribution) -> int:
    return round(1000 * (item.target_seconds or 0.0))
