"""Every reason of every condition, with its meaning. A test compares docs/conditions.md with it."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_operator.api.status import ConditionType
from vlm_operator.status.causes import DEPLOYMENT_CAUSES, POD_CAUSES

_CAUSES = {row.reason: row.meaning for row in POD_CAUSES} | dict(DEPLOYMENT_CAUSES)
_REFUSALS = {
    "SpecInvalid": "A field is wrong; the message names it and the fix.",
    "NodeClassInvalid": "A variant names a VLMNodeClass that does not exist or refuses the role.",
    "PodTemplateRefused": "The API server refuses a pod template in a dry run.",
}
_ROLE = {
    "AllReady": "Every pod of the role takes requests.",
    "AtZero": "The role is scaled to zero; a request wakes it.",
    "Degraded": "Enough pods serve, some are missing; the message says why.",
    "Creating": "Pods of a new generation are being created.",
    "PodsMissing": "Pods that were there are missing.",
    "PodsStarting": "A pod starts or loads its model.",
    "NotCreated": "No pod is created because of a refusal.",
    "Stopped": "spec.stopped is set.",
}
_NONE = {"NoPods": "There is no pod to judge."}

CAUSES: Mapping[str, str] = _CAUSES
REASONS_OF: Mapping[ConditionType, Mapping[str, str]] = {
    "Ready": {
        "Serving": "Every role serves at least its floor.",
        "Stopping": "spec.stopped is set and pods finish.",
        "Stopped": "spec.stopped is set and no pod is left.",
        "Deleting": "The service is being deleted; gateways finish their requests.",
        "DrainTimeout": "The service is still there 60 s after its drain timeout.",
        "NamespaceTerminating": "The namespace is being deleted.",
        "NameConflict": "An object of a child's name belongs to somebody else.",
        "ChildRefused": "The API server refuses a child.",
    },
    "Accepted": {"Valid": "The manifest is valid.", **_REFUSALS},
    "EncoderReady": _ROLE,
    "PrefillReady": _ROLE,
    "DecodeReady": _ROLE,
    "GatewayReady": _ROLE,
    "ScalingActive": {
        "Scaling": "The message lists who decides each pool's size.",
        "Manual": "The manifest says every size.",
        "Limited": "A bound, the budget or a ratio holds a pool.",
        "Off": "autoscaling.policy is Off.",
        "Advisory": "autoscaling.policy is Advisory.",
        "ScalingConflict": "Somebody else writes a VLMPool that the manifest or we decide.",
        "Stopped": "spec.stopped is set.",
        "Paused": "spec.paused is set.",
        **_REFUSALS,
    },
    "MetricsAvailable": {
        "AllAnswer": "Every serving pod answers to /stats.",
        "PodsSilent": "A serving pod does not answer.",
        "ReportsInvalid": "A pod answers with impossible numbers.",
        "TooLittleKnown": "The pods do not say enough to decide on.",
        **_NONE,
    },
    "CapacitySufficient": {
        "AllScheduled": "Every pod has a node.",
        "Pending": "A pod waits for a node and nothing speaks against it yet.",
        "Unschedulable": "No node fits a pod.",
        "QuotaExceeded": "A ResourceQuota does not allow one more pod.",
        "Exhausted": "A node type gives no node.",
        **_NONE,
    },
    "SLOAttainable": {
        "GoalMet": "TTFT is within its goal.",
        "GoalMissed": "TTFT exceeds its goal; the message names the stage.",
        "Unattainable": "No number of replicas meets the goal.",
        "NoRequests": "No request ended within the window.",
    },
    "RolloutProgressing": {
        "Starting": "Pods of this generation start; none of an older one is left.",
        "Progressing": "Pods of an older revision are being replaced.",
        "NoSpareCapacity": "A surge pod has no node, no quota or no budget.",
        "Complete": "Every role serves pods of the newest revision.",
        "DeadlineExceeded": "There was no progress for rollout.progressDeadlineSeconds.",
        "RollingBack": "A revision failed; the one before comes back.",
        "RolledBack": "A revision failed; the one before is served.",
        "Stopped": "spec.stopped is set.",
    },
    "Reconciling": {
        "Progressing": "The generation is not reached yet.",
        "Settled": "The generation is reached.",
        "Stalled": "A person is needed: see Stalled.",
        "Stopping": "spec.stopped is set and pods finish.",
        "Paused": "spec.paused is set.",
        "Deleting": "The service is being deleted.",
        "NamespaceTerminating": "The namespace is being deleted.",
        "ChildRefused": "The API server refused a child; the operator tries again.",
    },
    "Stalled": {
        "NotStalled": "Nothing waits for a person.",
        **_REFUSALS,
        "NameConflict": "An object of a child's name belongs to somebody else.",
        "ChildRefused": "The API server refused a child three times.",
        "ChildContested": "Somebody else has kept changing a child for ten minutes.",
        "RolloutFailed": "A revision failed.",
        "DeadlineExceeded": "There was no progress for rollout.progressDeadlineSeconds.",
        "Paused": "spec.paused is set and the plan differs from what is there.",
        "DrainTimeout": "A deleted service is still there 60 s after its drain timeout.",
    },
}
