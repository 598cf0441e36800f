"""Transitions worth an Event. docs/events.md is this table, tested.

Events come from comparing two statuses, so a new operator process repeats none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from vlm_operator import names
from vlm_operator.api.status import ConditionType
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.reasons import Reason
from vlm_operator.names import Role
from vlm_operator.state import Manifest
from vlm_operator.status.view import Told

REASONS = {
    "Ready": "Every role serves.",
    "NotReady": "A role no longer has all its pods; the message names the one thing that blocks.",
    "ConfigInvalid": "The manifest cannot be met as written; the message names the field.",
    "NameConflict": "An object of a child's name belongs to somebody else; it was left alone.",
    "ChildContested": "Somebody keeps changing an object of ours; it is put back ever more rarely.",
    "ChildRepaired": "Somebody changed an object of ours; the fields in the message were put back.",
    "ForeignObject": "An object with this service's labels belongs to others; it is ignored.",
    "Stalled": "Nothing happens until somebody acts; the message says what.",
    "ScaledUp": "A pool was made larger.",
    "ScaledDown": "A pool was made smaller.",
    "ScaleLimited": "A pool wanted a size that its bounds, the budget or a ratio does not allow.",
    "FlappingDamped": "A pool went up and down too often: it waits longer before it shrinks.",
    "SLOUnattainable": "No number of replicas meets the goal; the message names the stage.",
    "MetricsMissing": "Pods that serve do not answer; nothing is taken for zero.",
    "ScalePutBack": "Somebody scaled a VLMPool whose mode is Manual; it was put back.",
    "ScalingConflict": "Somebody keeps writing a VLMPool whose mode is Auto; it is held.",
    "NoFitNode": "A pod has no node, or a node type gives none; the message says what is missing.",
    "RolloutStarted": "Pods of a new revision are being created beside the old ones.",
    "RolloutComplete": "Every role serves pods of the newest revision.",
    "RolloutFailed": "A pod of the new revision had its time; the message names it and the cause.",
    "RolledBack": "The revision before the one that failed is served again.",
    "Draining": "The service is being deleted and finishes what it has.",
}
_NAMED = 5  # objects in one message
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
    "MetricsMissing",
    "NoFitNode",
    "RolloutFailed",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One line of `kubectl describe`; the reason stands in `REASONS`."""

    reason: str
    message: str

    @property
    def warning(self) -> bool:
        """Whether it is of type Warning."""
        return self.reason in _WARNINGS


def events(
    before: Manifest, after: Manifest, decisions: Iterable[tuple[Role, Decision]] = ()
) -> tuple[Event, ...]:
    """Return what is worth saying about the step from one status to the next.

    Args:
        before: the status as it stood; empty for a new service.
        after: the status of this turn.
        decisions: made in this turn; only those that somebody else's write caused are said.
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
        conflict = now["Stalled"]["reason"] == Told.NAME_CONFLICT
        yield Event("NameConflict" if conflict else "Stalled", message("Stalled"))
    if turned("Ready", "True"):
        yield Event("Ready", message("Ready"))
    if turned("Ready", "False") and was.get("Ready", {}).get("status") == "True":
        deleting = now["Ready"]["reason"] == Told.DELETING
        yield Event("Draining" if deleting else "NotReady", message("Ready"))
    if turned("CapacitySufficient", "False"):
        yield Event("NoFitNode", message("CapacitySufficient"))
    if (
        turned("ScalingActive", "False")
        and now["ScalingActive"]["reason"] == Reason.SCALING_CONFLICT
    ):
        yield Event("ScalingConflict", message("ScalingActive"))
    if turned("SLOAttainable", "False"):
        yield Event("SLOUnattainable", message("SLOAttainable"))
    if turned("MetricsAvailable", "False"):
        yield Event("MetricsMissing", message("MetricsAvailable"))
    damped = [which.get("ScalingActive", {}).get("reason") == Told.DAMPED for which in (was, now)]
    if damped == [False, True]:
        yield Event("FlappingDamped", message("ScalingActive"))
    limited = now.get("ScalingActive", {}).get("reason") == Told.LIMITED
    if limited and was.get("ScalingActive", {}).get("message") != message("ScalingActive"):
        yield Event("ScaleLimited", message("ScalingActive"))
    moving = [
        which.get("RolloutProgressing", {}).get("status") == "True"
        and which["RolloutProgressing"]["reason"] != Told.STARTING
        for which in (was, now)
    ]
    if moving == [False, True]:
        yield Event("RolloutStarted", message("RolloutProgressing"))
    reason = now.get("RolloutProgressing", {}).get("reason", "")
    ended = {
        Told.ROLLED_BACK: "RolledBack",
        Told.DEADLINE_EXCEEDED: "RolloutFailed",
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


def foreign_event(service: str, found: Iterable[tuple[str, str]]) -> Event:
    """Name objects, by kind and name, that only say that they belong to a service."""
    known = sorted(f"{kind} {name}" for kind, name in found)
    rest = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return Event(
        "ForeignObject",
        f"{', '.join(known[:_NAMED])}{rest}: labelled {names.LABEL_SERVICE}={service} and not "
        "controlled by this service, so not counted; remove the label or the object",
    )


def _by_type(status: Manifest) -> dict[str, Manifest]:
    return {item["type"]: item for item in status.get("conditions", [])}
