"""What conditions say of sizes: who decides, on what, whether there is room, what it is for."""

from __future__ import annotations

import datetime

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.explain import beyond, remedy
from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.autoscale.reasons import Bound, Reason
from vlm_operator.names import Role
from vlm_operator.status.readiness import roles
from vlm_operator.status.view import Told, Verdict, View

# What holds a pool for longer than a window, in words that do not change from tick to tick.
_LASTING: dict[str, str] = {
    Bound.MAX: "maxReplicas",
    Bound.BUDGET: "the budget",
    Bound.CAPACITY: "node types that give no node or are at their own maxReplicas",
    Bound.COUPLING: "the ratio to another pool",
}


def scaling(view: View) -> Verdict:
    """Who decides the pools' sizes, and whether anything hinders it."""
    spec = view.service.spec
    modes = {role: pool.scaling.mode for role, pool in spec.pools.present.items()}
    if spec.suspend:
        return Verdict("ScalingActive", False, "Suspended", "spec.suspend is set")
    if spec.paused:
        return Verdict("ScalingActive", False, "Paused", "spec.paused is set")
    for role, decision in view.decisions.items():
        if decision.conflict:
            message = f"{role}: {decision.message}"
            return Verdict("ScalingActive", False, Reason.SCALING_CONFLICT, message)
    for message in view.put_back.values():
        return Verdict("ScalingActive", False, Reason.SCALING_CONFLICT, message)
    policy = view.policy.apply
    if policy is not AutoscalingPolicy.ACTIVE and ScalingMode.AUTO in modes.values():
        message = {
            AutoscalingPolicy.OFF: "autoscaling.policy is Off: pools stay as they are",
            AutoscalingPolicy.ADVISORY: "autoscaling.policy is Advisory: "
            "status.pools.*.recommendation says what would be done",
        }[policy]
        return Verdict("ScalingActive", False, policy.value, message)
    limited = next((said for role in modes if (said := _limit(view, role))), "")
    if limited:
        return Verdict("ScalingActive", True, Told.LIMITED, limited)
    damped = [
        role
        for role, decision in view.decisions.items()
        if decision.flapping and modes.get(role) is ScalingMode.AUTO
    ]
    if damped:
        message = f"{damped[0]} went up and down too often: it waits longer before it shrinks"
        return Verdict("ScalingActive", True, Told.DAMPED, message)
    listed = ", ".join(f"{role} {mode.value}" for role, mode in modes.items())
    automatic = any(mode is not ScalingMode.MANUAL for mode in modes.values())
    return Verdict("ScalingActive", True, "Scaling" if automatic else "Manual", listed)


def _limit(view: View, role: Role) -> str:
    """What has a pool smaller or larger than is asked for, "" where nothing has."""
    decision = view.decisions.get(role)
    if decision is None or decision.limited_by is None:
        return ""
    if decision.limited_by == Bound.BUDGET_UNREADABLE:
        return f"{role}: nothing grows, the budget cannot be kept: {view.policy.budget.unreadable}"
    if view.policy.pools[role].mode is ScalingMode.EXTERNAL:
        return f"{role}: {decision.message}"
    word = _LASTING.get(decision.limited_by)
    return f"{role} is held at {decision.to} by {word}" if word else ""


def metrics(view: View) -> Verdict:
    """Whether the pods that serve answer to /stats; one that missed a tick is not silent yet."""
    asked = [pod for role in roles(view) for pod in view.serving(role)]
    answers, patience = (
        view.outcome.memory.estimate.answers,
        view.policy.tuning.stale_ticks * view.policy.tick_seconds,
    )
    heard = {uid for uid, last in answers.items() if view.observed.now - last.at <= patience}
    if not asked:
        return Verdict("MetricsAvailable", None, "NoPods", "no pod is ready yet")
    absurd = set(view.outcome.estimate.absurd)
    known = heard | view.observed.samples.keys() - absurd
    strange = [pod.name for pod in asked if pod.uid in absurd - heard]
    if strange:
        message = (
            f"{len(strange)} of {len(asked)} pods answer to /stats with impossible numbers, "
            f"first {strange[0]}: they count as silent; delete the pod and report it"
        )
        return Verdict("MetricsAvailable", False, "ReportsInvalid", message)
    silent = [pod.name for pod in asked if pod.uid not in known]
    if silent:
        message = f"{len(silent)} of {len(asked)} pods do not answer to /stats, first {silent[0]}"
        return Verdict("MetricsAvailable", False, "PodsSilent", message)
    held = [role for role, item in view.decisions.items() if item.held and view.serving(role)]
    if held and view.outcome.estimate.missing_seconds > patience:
        message = f"{held[0]}: its pods do not say enough to decide on, so nothing changes"
        return Verdict("MetricsAvailable", False, "TooLittleKnown", message)
    return Verdict("MetricsAvailable", True, "AllAnswer", f"{len(asked)} pods answer to /stats")


def capacity(view: View) -> Verdict:
    """Whether the cluster has room for every pod."""
    for role in roles(view):
        for problem in view.problems.get(role, ()):
            if problem.reason in ("Unschedulable", "QuotaExceeded"):
                message = f"{role}: {problem.message}"
                return Verdict("CapacitySufficient", False, problem.reason, message)
    for role, pace in view.outcome.memory.pace.pools.items():
        for name, item in sorted(pace.exhausted.items()):
            if view.observed.now < item.until:
                again = datetime.datetime.fromtimestamp(item.until, datetime.UTC)
                message = (
                    f"{role}: variant {name} {item.what}, not tried again before {again:%H:%M} UTC"
                )
                return Verdict("CapacitySufficient", False, "Exhausted", message)
    pods = [pod for role in roles(view) for pod in view.observed.of(role)]
    if not pods:
        return Verdict("CapacitySufficient", None, "NoPods", "no pod exists")
    waiting = next((pod for pod in pods if pod.pending), None)
    if waiting is not None:
        message = f"{waiting.role}: pod {waiting.name} waits for a node"
        return Verdict("CapacitySufficient", None, "Pending", message)
    return Verdict("CapacitySufficient", True, "AllScheduled", "every pod has a node")


def attainable(view: View) -> Verdict | None:
    """Whether the goal is met; None without a goal."""
    if not view.policy.ttft_seconds:
        return None
    aimed = [item for item in view.slo if item.target_seconds is not None]
    for item in aimed:
        if not item.attainable:
            message = f"{item.modality}: {beyond(item)}"
            return Verdict("SLOAttainable", False, Reason.UNATTAINABLE, message)
    if not aimed:
        return Verdict("SLOAttainable", None, "NoRequests", "no request ended within the window")
    for item in aimed:
        if item.overrun_seconds > 0:
            stage = item.dominant_stage or "unknown"
            message = (
                f"{item.modality}: TTFT p95 exceeds the goal of {_target(item)} ms, most of it "
                f"goes to {stage}; {remedy(stage)} would help"
            )
            return Verdict("SLOAttainable", None, "GoalMissed", message)
    goals = ", ".join(f"{item.modality} {_target(item)} ms" for item in aimed)
    return Verdict("SLOAttainable", True, "GoalMet", f"TTFT p95 is within its goal: {goals}")


def _target(item: Attribution) -> int:
    return round(1000 * (item.target_seconds or 0.0))
