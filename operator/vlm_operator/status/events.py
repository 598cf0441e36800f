"""Finds transitions that become Events. docs/events.md explains each reason; a test compares them.

Events follow from the comparison of two statuses, so a new operator process repeats none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from vlm_operator import names
from vlm_operator.api.status import ConditionType
from vlm_operator.autoscale.outcome import Decision, Reason
from vlm_operator.names import Role
from vlm_operator.state import Manifest
from vlm_operator.status.inputs import ConditionReason

_NAMED = 5  # limit of objects in one message
_WARNINGS = {
    "NotReady",
    "ConfigInvalid",
    "NameConflict",
    "ChildContested",
    "ForeignObject",
    "Stalled",
    "ScalePutBack",
    "ScalingConflict",
    "SLOUnattainable",
    "PodsSilent",
    "CertificateFailed",
    "Unschedulable",
    "RolloutFailed",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One Event; docs/events.md lists the reasons."""

    reason: str
    message: str

    @property
    def warning(self) -> bool:
        return self.reason in _WARNINGS


def events(
    before: Manifest, after: Manifest, decisions: Iterable[tuple[Role, Decision]] = ()
) -> tuple[Event, ...]:
    """Return the Events of the step from one status to the next; the status of a new service is {}.

    Decisions of this turn that revert another writer's change become Events.
    """
    return (*_conditions(before, after), *_pools(before, after), *_put_back(decisions))


def _conditions(before: Manifest, after: Manifest) -> Iterator[Event]:
    was, now = _by_type(before), _by_type(after)

    def turned(kind: ConditionType, status: str) -> bool:
        return now.get(kind, {}).get("status") == status != was.get(kind, {}).get("status")

    def message(kind: ConditionType) -> str:
        return str(now[kind]["message"])

    if turned("Accepted", "False"):
        yield Event("ConfigInvalid", message("Accepted"))
    if turned("Stalled", "True"):
        conflict = now["Stalled"]["reason"] == ConditionReason.NAME_CONFLICT
        yield Event("NameConflict" if conflict else "Stalled", message("Stalled"))
    if turned("Ready", "True"):
        yield Event("Ready", message("Ready"))
    if turned("Ready", "False") and was.get("Ready", {}).get("status") == "True":
        reasons = {ConditionReason.DELETING: "Draining", ConditionReason.WAKING: "Waking"}
        yield Event(reasons.get(now["Ready"]["reason"], "NotReady"), message("Ready"))
    if turned("CapacitySufficient", "False"):
        yield Event("Unschedulable", message("CapacitySufficient"))
    if (
        turned("ScalingActive", "False")
        and now["ScalingActive"]["reason"] == Reason.SCALING_CONFLICT
    ):
        yield Event("ScalingConflict", message("ScalingActive"))
    if turned("ModelReady", "True"):
        yield Event("ModelDownloaded", message("ModelReady"))
    if turned("CertificatesReady", "False"):
        yield Event("CertificateFailed", message("CertificatesReady"))
    if turned("SLOAttainable", "False"):
        yield Event("SLOUnattainable", message("SLOAttainable"))
    if turned("MetricsAvailable", "False"):
        yield Event("PodsSilent", message("MetricsAvailable"))
    limited = now.get("ScalingActive", {}).get("reason") == ConditionReason.LIMITED
    if limited and was.get("ScalingActive", {}).get("message") != message("ScalingActive"):
        yield Event("ScaleLimited", message("ScalingActive"))
    moving = [
        which.get("RolloutProgressing", {}).get("status") == "True"
        and which["RolloutProgressing"]["reason"]
        not in (ConditionReason.STARTING, ConditionReason.WAITS_FOR_MODEL)
        for which in (was, now)
    ]
    if moving == [False, True]:
        yield Event("RolloutStarted", message("RolloutProgressing"))
    reason = now.get("RolloutProgressing", {}).get("reason", "")
    ended = {
        ConditionReason.ROLLED_BACK: "RolledBack",
        ConditionReason.DEADLINE_EXCEEDED: "RolloutFailed",
        "Complete": "RolloutComplete",
    }
    if moving == [True, False] and reason in ended:
        yield Event(ended[reason], message("RolloutProgressing"))


def _pools(before: Manifest, after: Manifest) -> Iterator[Event]:
    for role, pool in after.get("pools", {}).items():
        old = before.get("pools", {}).get(role)
        if old is None or old["desiredReplicas"] == pool["desiredReplicas"]:
            continue
        up = pool["desiredReplicas"] > old["desiredReplicas"]
        why = pool.get("lastDecision", {}).get("message", "")
        sizes = f"{role} from {old['desiredReplicas']} to {pool['desiredReplicas']}"
        yield Event("ScaledUp" if up else "ScaledDown", f"{sizes}: {why}" if why else sizes)


def _put_back(decisions: Iterable[tuple[Role, Decision]]) -> Iterator[Event]:
    for role, decision in decisions:
        if decision.reason == Reason.PUT_BACK:
            yield Event("ScalePutBack", f"{role}: {decision.message}")


def foreign_event(service: str, objects: Iterable[tuple[str, str]]) -> Event:
    """Return the Event about objects with the service's label that it does not control.

    `objects` contains pairs of kind and name.
    """
    labels = sorted(f"{kind} {name}" for kind, name in objects)
    rest = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return Event(
        "ForeignObject",
        f"{', '.join(labels[:_NAMED])}{rest}: labelled {names.LABEL_SERVICE}={service} and not "
        "controlled by this service, so not counted; remove the label or the object",
    )


def _by_type(status: Manifest) -> dict[str, Manifest]:
    return {item["type"]: item for item in status.get("conditions", [])}
