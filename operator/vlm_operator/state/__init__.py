"""What was seen: pods, their own reports, the objects a service owns. Values only.

reports.py      a pod's /stats                                   Sample
containers.py   one container of a pod                           ContainerState
seen.py         pods, node classes, everything of a service      Observed
deployments.py  one role, variant and revision                   DeploymentState
owners.py       whose an object is                               owned_by, is_pod_of
revisions.py    what pods are made of, and the notes of it on Deployments

`observe` and `scrape` fill them.
"""

from vlm_operator.state.containers import ContainerState
from vlm_operator.state.deployments import DeploymentState, Manifest
from vlm_operator.state.owners import controller, is_pod_of, names_of, owned_by, parted
from vlm_operator.state.reports import (
    Busy,
    Gaps,
    KvTokens,
    ModelFacts,
    Phase,
    Sample,
    StageSeconds,
    Ttft,
)
from vlm_operator.state.revisions import (
    ANNOTATION_APPLIED,
    ANNOTATION_DELETION_COST,
    ANNOTATION_FAILED,
    ANNOTATION_INITIAL,
    ANNOTATION_INPUTS,
    ANNOTATION_RESOLVED,
    Resolved,
    Revision,
)
from vlm_operator.state.seen import NodeClassState, Observed, PodState

__all__ = [
    "ANNOTATION_APPLIED",
    "ANNOTATION_DELETION_COST",
    "ANNOTATION_FAILED",
    "ANNOTATION_INITIAL",
    "ANNOTATION_INPUTS",
    "ANNOTATION_RESOLVED",
    "Busy",
    "ContainerState",
    "DeploymentState",
    "Gaps",
    "KvTokens",
    "Manifest",
    "ModelFacts",
    "NodeClassState",
    "Observed",
    "Phase",
    "PodState",
    "Resolved",
    "Revision",
    "Sample",
    "StageSeconds",
    "Ttft",
    "controller",
    "is_pod_of",
    "names_of",
    "owned_by",
    "parted",
]
