"""Computes ScalingActive, MetricsAvailable, CapacitySufficient and SLOAttainable."""

from __future__ import annotations

import datetime

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.explain import beyond, remedy
from vlm_operator.autoscale.outcome import Attribution, Bound, Reason
from vlm_operator.names import Role
from vlm_operator.status.inputs import ConditionReason, ConditionState, StatusInputs
from vlm_operator.status.readiness import roles

# Bounds that limit a pool for longer than a window, in words that do not change between ticks.
_LASTING: dict[str, str] = {
    Bound.MAX: "maxReplicas",
    Bound.BUDGET: "the budget",
    Bound.CAPACITY: "node types that give no node or are at their own maxReplicas",
    Bound.POOL_RATIO: "the ratio to another pool",
}


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
