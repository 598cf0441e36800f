"""The status of a service whose manifest is refused, or that is being deleted. Pure.

A refused manifest changes no pod: what served before serves on. So Ready and the roles tell what
the pods do, and the conditions about decisions say that none is made.
"""

from __future__ import annotations

import datetime

from vlm_operator.errors import SpecError
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Manifest, Observed
from vlm_operator.status.build import conditions
from vlm_operator.status.readiness import READY_NAMES
from vlm_operator.status.view import Failure, Told, Verdict

CLASS_SECONDS = 60.0  # that a node class may come later than the service that names it


def refusal(error: SpecError, previous: Manifest, *, now: float) -> Failure:
    """Say what a refused manifest needs; a missing node class may still be on its way."""
    if not error.path.endswith(".nodeClassRef"):
        return Failure(Told.SPEC_INVALID, str(error), accepted=False)
    known = {item["type"]: item for item in previous.get("conditions", [])}
    before, since = known.get("Accepted", {}), now
    if (before.get("reason"), before.get("message")) == (Told.CLASS_INVALID, str(error)):
        since = datetime.datetime.fromisoformat(before["lastTransitionTime"]).timestamp()
    waited = now - since >= CLASS_SECONDS
    return Failure(Told.CLASS_INVALID, str(error), accepted=False, person=waited)


def refused_status(
    failure: Failure, previous: Manifest, observed: Observed, *, generation: int
) -> Manifest:
    """Return the status of a service whose manifest is refused."""
    reason, message = failure.reason, failure.message
    roles = [_role(role, observed) for role in (*POOL_ROLES, Role.GATEWAY)]
    known = [item for item in roles if item is not None]
    short = next((item for item in known if not item.status), None)
    served = bool(known) and short is None
    last = "the last accepted manifest is served; see Accepted"
    said = [
        Verdict("Ready", True, "Serving", last)
        if served
        else Verdict("Ready", False, reason, message),
        Verdict("Accepted", False, reason, message),
        *known,
        Verdict("ScalingActive", False, reason, "pools keep their sizes"),
        Verdict("MetricsAvailable", None, reason, "not judged while the manifest is refused"),
        Verdict("CapacitySufficient", None, reason, "not judged while the manifest is refused"),
        Verdict("RolloutProgressing", False, reason, "the refused manifest is not rolled out"),
        Verdict(
            "Reconciling",
            not failure.person,
            reason,
            "a person is needed: see Stalled" if failure.person else message,
        ),
        Verdict("Stalled", failure.person, reason, message),
    ]
    fresh = conditions(said, previous, generation, now=observed.now)
    kept = {key: value for key, value in previous.items() if key != "lastProgressTime"}
    return {**kept, "observedGeneration": generation, "conditions": fresh}


def deleting_status(message: str, previous: Manifest, *, generation: int, now: float) -> Manifest:
    """Return the last status with what a deletion waits for."""
    said = [
        Verdict("Ready", False, Told.DELETING, message),
        Verdict("Reconciling", True, Told.DELETING, message),
        Verdict("Stalled", False, Told.DELETING, "nothing waits for a person"),
    ]
    told = {item.type for item in said}
    others = [item for item in previous.get("conditions", []) if item["type"] not in told]
    fresh = conditions(said, previous, generation, now=now)
    return {**previous, "observedGeneration": generation, "conditions": [*fresh, *others]}


def _role(role: Role, observed: Observed) -> Verdict | None:
    """What the pods of a role do; None for a role that has neither pods nor Deployments."""
    own = [item for item in observed.deployments() if item.role is role]
    want = sum(item.desired for item in own)
    pods = observed.of(role)
    if not own and not pods:
        return None
    have = sum(pod.ready and not pod.draining for pod in pods)
    count = f"{role} {have}/{want}"
    if have >= want:
        return Verdict(READY_NAMES[role], True, "AllReady", count)
    waiting = next((pod for pod in pods if not pod.ready and pod.blocked), None)
    what = f"pod {waiting.name}: {waiting.blocked}" if waiting else "pods are missing"
    return Verdict(READY_NAMES[role], False, "PodsMissing", f"{count}: {what}")
