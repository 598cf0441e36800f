"""Builds the status of objects on which the operator does not act. Pure.

A VLMService whose manifest is refused or that is being deleted; a VLMPool without a VLMService.

A refused manifest changes no pod, so pods that served before continue. Ready and the role
conditions describe the pods; the conditions about decisions say that none is made.
"""

from __future__ import annotations

from vlm_operator import names
from vlm_operator.cluster import epoch_seconds
from vlm_operator.errors import SpecError
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Manifest, Observed
from vlm_operator.state.owners import controller
from vlm_operator.status.causes import sentence
from vlm_operator.status.conditions import NOT_STALLED, SEE_STALLED, with_times
from vlm_operator.status.inputs import ConditionReason, ConditionState, Failure
from vlm_operator.status.readiness import READY_NAMES

NO_SERVICE = "NoService"
CLASS_SECONDS = 60.0  # a node class may be created this much later than its service


def refusal(error: SpecError, previous: Manifest, *, now: float) -> Failure:
    """Return the failure for a refused manifest.

    A missing node class may be created soon, so it needs a user only after `CLASS_SECONDS`.
    """
    if not error.path.endswith(".nodeClassRef"):
        return Failure(ConditionReason.SPEC_INVALID, str(error), accepted=False)
    conditions = {item["type"]: item for item in previous.get("conditions", [])}
    before, since = conditions.get("Accepted", {}), now
    if (before.get("reason"), before.get("message")) == (ConditionReason.CLASS_INVALID, str(error)):
        since = epoch_seconds(before["lastTransitionTime"])
    waited = now - since >= CLASS_SECONDS
    return Failure(
        ConditionReason.CLASS_INVALID, str(error), accepted=False, needs_user_action=waited
    )


def refused_status(
    failure: Failure, previous: Manifest, observed: Observed, *, generation: int
) -> Manifest:
    reason, message = failure.reason, failure.message
    roles = [_role(role, observed) for role in (*POOL_ROLES, Role.GATEWAY)]
    present = [item for item in roles if item is not None]
    short = next((item for item in present if not item.status), None)
    served = bool(present) and short is None
    last = "the last accepted manifest is served; see Accepted"
    unjudged = "not judged while the manifest is refused"
    states = [
        ConditionState("Ready", True, "Serving", last)
        if served
        else ConditionState("Ready", False, reason, message),
        ConditionState("Accepted", False, reason, message),
        *present,
        ConditionState("ScalingActive", False, reason, "pools keep their sizes"),
        ConditionState("MetricsAvailable", None, reason, unjudged),
        ConditionState("CapacitySufficient", None, reason, unjudged),
        ConditionState(
            "RolloutProgressing", False, reason, "the refused manifest is not rolled out"
        ),
        ConditionState(
            "Reconciling",
            not failure.needs_user_action,
            reason,
            SEE_STALLED.message if failure.needs_user_action else message,
        ),
        ConditionState("Stalled", failure.needs_user_action, reason, message),
    ]
    fresh = with_times(states, previous, generation=generation, now=observed.now)
    rest = {key: value for key, value in previous.items() if key != "lastProgressTime"}
    return {**rest, "observedGeneration": generation, "conditions": fresh}


def deleting_status(
    message: str, previous: Manifest, *, generation: int, now: float, overdue: bool
) -> Manifest:
    """Return the last status with what a deletion waits for.

    If `overdue`, the deletion is Stalled. `now` is in seconds since the epoch.
    """
    reason = ConditionReason.DRAIN_TIMEOUT if overdue else ConditionReason.DELETING
    states = [
        ConditionState("Ready", False, reason, message),
        SEE_STALLED if overdue else ConditionState("Reconciling", True, reason, message),
        ConditionState("Stalled", True, reason, message) if overdue else NOT_STALLED,
    ]
    types = {item.type for item in states}
    others = [item for item in previous.get("conditions", []) if item["type"] not in types]
    fresh = with_times(states, previous, generation=generation, now=now)
    return {**previous, "observedGeneration": generation, "conditions": [*fresh, *others]}


def unowned_status(manifest: Manifest, *, now: float) -> Manifest | None:
    """Return the status of a VLMPool that a user created; None if a VLMService controls it.

    None also if it is being deleted. kstatus reads Stalled=True as Failed.
    """
    meta = manifest["metadata"]
    owner = controller(manifest)
    if "deletionTimestamp" in meta or (
        owner is not None
        and owner.get("kind") == names.KIND_SERVICE
        and str(owner.get("apiVersion", "")).partition("/")[0] == names.GROUP
    ):
        return None
    state = ConditionState(
        "Stalled",
        True,
        NO_SERVICE,
        sentence(
            "no VLMService controls this VLMPool: it has no effect and no pods",
            "delete it and create a VLMService, for which the operator makes VLMPools",
        ),
    )
    previous, generation = manifest.get("status", {}), meta["generation"]
    return {"conditions": with_times([state], previous, generation=generation, now=now)}


def _role(role: Role, observed: Observed) -> ConditionState | None:
    """Return the readiness condition of a role; None if it has neither pods nor Deployments."""
    own = [item for item in observed.deployments() if item.role is role]
    want = sum(item.desired for item in own)
    pods = observed.of(role)
    if not own and not pods:
        return None
    have = sum(pod.ready and not pod.draining for pod in pods)
    count = f"{role} {have}/{want}"
    if have >= want:
        return ConditionState(READY_NAMES[role], True, "AllReady", count)
    waiting = next((pod for pod in pods if not pod.ready and pod.blocked), None)
    what = f"pod {waiting.name}: {waiting.blocked}" if waiting else "pods are missing"
    return ConditionState(READY_NAMES[role], False, "PodsMissing", f"{count}: {what}")
