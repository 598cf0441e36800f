"""What conditions say of sizes: who decides, on what, whether there is room, what it is for."""

from __future__ import annotations

from vlm_operator.api import ScalingMode
from vlm_operator.status.readiness import roles
from vlm_operator.status.view import Verdict, View


def scaling(view: View) -> Verdict:
    """Who decides the pools' sizes, and whether anything hinders it."""
    if view.service.spec.suspend:
        return Verdict("ScalingActive", False, "Suspended", "spec.suspend is set")
    if view.service.spec.paused:
        return Verdict("ScalingActive", False, "Paused", "spec.paused is set")
    limited = ""
    for role, decision in view.decisions.items():
        if decision.conflict:
            message = f"{role}: {decision.message}"
            return Verdict("ScalingActive", False, "ScalingConflict", message)
        if decision.limited_by in ("Min", "Max") and not limited:
            limited = f"{role}: {decision.message}"
    if limited:
        return Verdict("ScalingActive", True, "Limited", limited)
    modes = {role: pool.scaling.mode for role, pool in view.service.spec.pools.present.items()}
    listed = ", ".join(f"{role} {mode.value}" for role, mode in modes.items())
    automatic = any(mode is not ScalingMode.MANUAL for mode in modes.values())
    return Verdict("ScalingActive", True, "Scaling" if automatic else "Manual", listed)


def metrics(view: View) -> Verdict:
    """Whether the pods that serve answer to /stats."""
    asked = [pod for role in roles(view) for pod in view.serving(role)]
    if not asked:
        return Verdict("MetricsAvailable", None, "NoPods", "no pod is ready yet")
    silent = [pod.name for pod in asked if pod.uid not in view.observed.samples]
    if silent:
        message = f"{len(silent)} of {len(asked)} pods do not answer to /stats, first {silent[0]}"
        return Verdict("MetricsAvailable", False, "PodsSilent", message)
    return Verdict("MetricsAvailable", True, "AllAnswer", f"{len(asked)} pods answer to /stats")


def capacity(view: View) -> Verdict:
    """Whether the cluster has room for every pod."""
    for role in roles(view):
        for pod in view.observed.of(role):
            if pod.pending and pod.blocked:
                message = f"{role}: pod {pod.name} {pod.blocked}"
                return Verdict("CapacitySufficient", False, "Unschedulable", message)
    return Verdict("CapacitySufficient", True, "AllScheduled", "every pod has a node")


def attainable(view: View) -> Verdict | None:
    """Whether the goal is met; None without a goal."""
    goal = view.service.spec.slo.ttft_p95_milliseconds
    if goal is None:
        return None
    if not view.slo.found:
        return Verdict("SLOAttainable", None, "NoRequests", "no request has ended yet")
    goals = {
        item.modality.value: item.ttft_p95_milliseconds for item in view.service.spec.slo.overrides
    }
    for item in view.slo.found:
        target = goals.get(item.modality.capitalize(), goal)
        if item.p95_seconds * 1000 > target:
            stage = item.dominant_stage or "unknown"
            message = (
                f"{item.modality}: TTFT p95 is {round_ms(item.p95_seconds)} ms, "
                f"the goal is {target} ms; most of it goes to {stage}"
            )
            return Verdict("SLOAttainable", None, "GoalMissed", message)
    return Verdict("SLOAttainable", True, "GoalMet", f"TTFT p95 is within {goal} ms")


def round_ms(seconds: float) -> int:
    """Latencies are shown in steps of 10 ms."""
    return round(seconds * 100) * 10
