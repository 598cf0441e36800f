"""Conditions, as a list of predicates in reading order. Each names the one thing that blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from vlm_operator.api import ScalingMode
from vlm_operator.names import Role
from vlm_operator.state import PodState, Sample
from vlm_operator.status.view import View

_READY_NAMES = {
    Role.ENCODER: "EncoderReady",
    Role.PREFILL: "PrefillReady",
    Role.DECODE: "DecodeReady",
    Role.GATEWAY: "GatewayReady",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One condition without its times. `status` is None where nobody knows."""

    type: str
    status: bool | None
    reason: str
    message: str


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
    for role in _roles(view):
        found = _role_ready(view, role)
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
    asked = [pod for role in _roles(view) for pod in view.serving(role)]
    if not asked:
        return Verdict("MetricsAvailable", None, "NoPods", "no pod is ready yet")
    silent = [pod.name for pod in asked if pod.uid not in view.observed.samples]
    if silent:
        message = f"{len(silent)} of {len(asked)} pods do not answer to /stats, first {silent[0]}"
        return Verdict("MetricsAvailable", False, "PodsSilent", message)
    return Verdict("MetricsAvailable", True, "AllAnswer", f"{len(asked)} pods answer to /stats")


def capacity(view: View) -> Verdict:
    """Whether the cluster has room for every pod."""
    for role in _roles(view):
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


def rollout(view: View) -> Verdict:
    """Whether pods of an older revision are still there."""
    if view.step.done:
        return Verdict("RolloutProgressing", False, "Complete", "all pods are of one revision")
    return Verdict("RolloutProgressing", True, "Progressing", view.step.waiting)


def reconciling(view: View) -> Verdict:
    """Kstatus' word for: on its way, no person needed."""
    stuck = view.failure is not None and view.failure.person
    moving = not stuck and not ready(view).status and not view.service.spec.suspend
    if moving or not view.step.done:
        message = view.step.waiting or ready(view).message
        return Verdict("Reconciling", True, "Progressing", message)
    return Verdict("Reconciling", False, "Settled", "nothing is left to do")


def stalled(view: View) -> Verdict:
    """Kstatus' word for: nothing happens until a person acts."""
    failure = view.failure
    if failure is not None and failure.person and failure.accepted:
        return Verdict("Stalled", True, failure.reason, failure.message)
    return Verdict("Stalled", False, "NotStalled", "no person is needed")


def round_ms(seconds: float) -> int:
    """Latencies are shown in steps of 10 ms."""
    return round(seconds * 100) * 10


def _role_check(role: Role) -> Check:
    def check(view: View) -> Verdict | None:
        return _role_ready(view, role) if role in _roles(view) else None

    return check


def _role_ready(view: View, role: Role) -> Verdict:
    kind = _READY_NAMES[role]
    want = _want(view, role)
    have = len(view.serving(role))
    count = f"{role} {have}/{want}"
    if view.service.spec.suspend:
        return Verdict(kind, False, "Suspended", f"{count}: spec.suspend is set")
    if have >= want:
        note = ""
        if role is Role.GATEWAY and view.service.spec.gateway.auth.secret_ref is None:
            note = ": open to everyone who reaches it, gateway.auth is not set"
        return Verdict(kind, True, "AllReady", count + note)
    return Verdict(kind, False, *_blocking(view, role, count))


def _want(view: View, role: Role) -> int:
    if role is Role.GATEWAY:
        return view.service.spec.gateway.replicas
    return view.desired.get(role, 0)


def _blocking(view: View, role: Role, count: str) -> tuple[str, str]:
    """Return the reason and the one thing that blocks: the worst pod first."""
    waiting = [pod for pod in view.observed.of(role) if not pod.ready and not pod.draining]
    if not waiting:
        return "PodsMissing", f"{count}: pods are being created"
    worst = min(waiting, key=lambda pod: (not pod.blocked, not pod.pending, pod.created))
    if worst.blocked:
        pending = worst.blocked.startswith("Pending")
        reason = "PodsPending" if pending else "PodsFailing"
        return reason, f"{count}: pod {worst.name} {worst.blocked}"
    sample = view.observed.samples.get(worst.uid)
    return "PodsStarting", f"{count}: pod {worst.name} {_doing(worst, sample)}"


def _doing(pod: PodState, sample: Sample | None) -> str:
    if not pod.scheduled:
        return "waits for a node"
    if sample is not None and sample.phase == "failed":
        return f"failed: {sample.message}"
    if sample is not None and sample.message:
        return f"starts: {sample.message}"
    if pod.containers_ready:
        return "is ready and about to accept requests"
    return f"starts on node {pod.node}"


def _roles(view: View) -> tuple[Role, ...]:
    return (*view.service.spec.pools.present, Role.GATEWAY)


CHECKS: tuple[Check, ...] = (
    ready,
    accepted,
    *(_role_check(role) for role in _READY_NAMES),
    scaling,
    metrics,
    capacity,
    attainable,
    rollout,
    reconciling,
    stalled,
)
