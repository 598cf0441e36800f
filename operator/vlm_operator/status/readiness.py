"""Whether one role serves, and the one thing that keeps it from that."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_operator.api.status import ConditionType
from vlm_operator.names import Role
from vlm_operator.state import PodState, Sample
from vlm_operator.status.view import Verdict, View

READY_NAMES: Mapping[Role, ConditionType] = {
    Role.ENCODER: "EncoderReady",
    Role.PREFILL: "PrefillReady",
    Role.DECODE: "DecodeReady",
    Role.GATEWAY: "GatewayReady",
}


def roles(view: View) -> tuple[Role, ...]:
    """Every role that has pods, in the order in which a request passes them; gateway last."""
    return (*view.service.spec.pools.present, Role.GATEWAY)


def role_ready(view: View, role: Role) -> Verdict:
    """Judge one role's readiness."""
    kind = READY_NAMES[role]
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
