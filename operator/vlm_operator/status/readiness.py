"""Computes the readiness of roles, with one blocking cause each.

serving < floor       False  the worst problem, or the state of the next pod
serving < desired     True   Degraded, with the same words
else                  True   AllReady
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import ScalingMode
from vlm_operator.api.pool import Pool
from vlm_operator.api.status import ConditionType
from vlm_operator.cluster import DEPLOYMENT
from vlm_operator.names import Role
from vlm_operator.rollout.replica_counts import share
from vlm_operator.state import DeploymentState, PodState, Sample
from vlm_operator.status.causes import (
    POD_CAUSES,
    SERVING_CAUSES,
    Problem,
    Reference,
    pod_problem,
    references,
    refused_pods,
)
from vlm_operator.status.inputs import ConditionReason, ConditionState, StatusInputs
from vlm_operator.status.progress import steady

READY_NAMES: Mapping[Role, ConditionType] = {
    Role.ENCODER: "EncoderReady",
    Role.PREFILL: "PrefillReady",
    Role.DECODE: "DecodeReady",
    Role.GATEWAY: "GatewayReady",
}
_ORDER = {row.reason: number for number, row in enumerate(POD_CAUSES)}


def roles(view: StatusInputs) -> tuple[Role, ...]:
    """Return every role of the service in the order of a request's stages; the gateway is last."""
    return (*view.service.spec.pools.present, Role.GATEWAY)


def role_ready(view: StatusInputs, role: Role) -> ConditionState:
    kind, want = READY_NAMES[role], wanted(view, role)
    have = len(view.serving(role))
    count = f"{role} {have}/{want}"
    if view.service.spec.stopped:
        return ConditionState(kind, False, "Stopped", f"{count}: spec.stopped is set")
    if want == 0:
        return ConditionState(kind, True, "AtZero", f"{count}: a request wakes it")
    if have >= want:
        for problem in problems(view, role):
            if problem.reason in SERVING_CAUSES:
                return ConditionState(kind, True, problem.reason, f"{count}: {problem.message}")
        note = ""
        if role is Role.GATEWAY and view.service.spec.gateway.auth.secret_ref is None:
            note = ": open to every client that reaches it, because gateway.auth is not set"
        return ConditionState(kind, True, "AllReady", count + note)
    reason, message = _blocking(view, role)
    if have >= floor(view, role):
        return ConditionState(kind, True, "Degraded", f"{count}: {message}")
    return ConditionState(kind, False, reason, f"{count}: {message}")


def serving(view: StatusInputs) -> bool:
    return all(role_ready(view, role).status for role in roles(view))


def reached(view: StatusInputs) -> bool:
    """Whether every role has its floor in pods of the revisions that the rollout goes to."""
    return serving(view) and all(
        sum(pod.ready and not pod.draining for pod in view.aimed(role)) >= floor(view, role)
        for role in roles(view)
    )


def wanted(view: StatusInputs, role: Role) -> int:
    if role is Role.GATEWAY:
        return view.service.spec.gateway.replicas
    return view.desired.get(role, 0)


def floor(view: StatusInputs, role: Role) -> int:
    """Return the number of serving pods below which a role is not ready.

    Pods above minReplicas in a pool that scales do not count, so the role is ready while they
    start.
    """
    want = wanted(view, role)
    pool: Pool | None = None if role is Role.GATEWAY else view.service.spec.pools.of(role)
    if pool is None or want == 0:
        return want
    if pool.scaling.mode is not ScalingMode.MANUAL and pool.scaling.min_replicas is not None:
        want = min(want, pool.scaling.min_replicas)
    return max(1, want - share(pool.rollout.max_unavailable or "0", want, up=False))


def examined(view: StatusInputs) -> StatusInputs:
    """Return the view with the problems of its pods and Deployments."""
    if not any(not pod.ready and not pod.draining for pod in view.observed.pods):
        fields: dict[Reference, str] = {}
    else:
        fields = references(view.written.spec.to_dict())
    problems_by_role = {role: tuple(_problems(view, role, fields)) for role in roles(view)}
    return dataclasses.replace(view, problems=problems_by_role)


def problems(view: StatusInputs, role: Role) -> tuple[Problem, ...]:
    """Return the problems of a role in an `examined` view; those that need a user are first."""
    return view.problems.get(role, ())


def _problems(view: StatusInputs, role: Role, fields: Mapping[Reference, str]) -> list[Problem]:
    result = []
    pool: Pool | None = None if role is Role.GATEWAY else view.service.spec.pools.of(role)
    devices = {item.name: item.accelerators() for item in pool.variants} if pool else {}
    for pod in view.aimed(role):
        sample = view.observed.samples.get(pod.uid)
        num = devices.get(pod.variant, 0)
        problem = pod_problem(pod, sample, accelerators=num, fields=fields)
        if problem is not None and (not pod.ready or problem.reason in SERVING_CAUSES):
            result.append(problem)
    result += [
        refused
        for manifest in view.observed.of_kind(DEPLOYMENT.kind)
        if (refused := refused_pods(manifest))
        and (state := DeploymentState.of(manifest)) is not None
        and state.role is role
        and view.aims_at(role, state.variant, state.revision)
    ]
    now = view.observed.now
    return sorted(
        result,
        key=lambda item: (not item.needs_user(now), _ORDER.get(item.reason, -1), item.subject),
    )


def _blocking(view: StatusInputs, role: Role) -> tuple[str, str]:
    """Return reason and message of the worst problem, else of the oldest pod that is not ready."""
    for problem in problems(view, role):
        return problem.reason, problem.message
    if view.held and not view.observed.of(role):
        return ConditionReason.WAITS_FOR_MODEL, "no pod runs before the model is downloaded"
    if view.failure is not None and not view.observed.of(role):
        return "NotCreated", "no pod is created, because of " + view.failure.reason
    waiting = [pod for pod in view.observed.of(role) if not pod.ready and not pod.draining]
    if not waiting:
        return ("PodsMissing" if view.settled else "Creating"), "pods are being created"
    first = min(waiting, key=lambda pod: (not pod.blocked, pod.created, pod.name))
    if first.blocked:
        return "PodsFailing", f"pod {first.name}: {first.blocked}"
    return "PodsStarting", f"pod {first.name} {_doing(view, first)}"


def where_to_look(view: StatusInputs) -> str:
    """Return the command to run if a service makes no progress and no cause is known."""
    space = f"kubectl -n {view.service.namespace}"
    for role in roles(view):
        late = [pod for pod in view.observed.of(role) if not pod.ready and not pod.draining]
        if late:
            name = min(late, key=lambda pod: (not pod.blocked, pod.created, pod.name)).name
            longer = "raise rollout.progressDeadlineSeconds if it only needs longer"
            return f"see {space} describe pod {name} and {space} logs {name}, {longer}"
    return f"see {space} describe deployments -l {names.LABEL_SERVICE}={view.service.name}"


def _doing(view: StatusInputs, pod: PodState) -> str:
    sample: Sample | None = view.observed.samples.get(pod.uid)
    if not pod.scheduled:
        return "waits for a node"
    if pod.role is Role.GATEWAY and sample is not None and sample.phase != "ready":
        lacking = [role for role in view.service.spec.pools.present if not view.serving(role)]
        if lacking:
            return "waits for a ready pod of: " + ", ".join(lacking)
    if sample is not None and sample.message and sample.phase == "loading":
        return f"starts: {steady(sample.message)}"
    if pod.containers_ready:
        return "is ready and about to accept requests"
    return f"starts on node {pod.node}"
