"""The observed state: pods, their statistics, the objects of a service. Values only.

pod_stats.py    a pod's /stats                                          Sample
cluster_view.py pods, node classes, all objects of a service            Observed
deployments.py  revisions, and the Deployments that store them          DeploymentState, Revision
owners.py       the owner of an object                                  owned_by, is_pod_of

`observe` and `scrape` build these values.
"""

from vlm_operator.cluster import Manifest
from vlm_operator.state.cluster_view import (
    ContainerState,
    NodeClassState,
    Observed,
    PodState,
    error_line,
    one_line,
)
from vlm_operator.state.deployments import (
    ANNOTATION_APPLIED,
    ANNOTATION_DELETION_COST,
    ANNOTATION_FAILED,
    ANNOTATION_INITIAL,
    ANNOTATION_INPUTS,
    ANNOTATION_RESOLVED,
    DeploymentState,
    Key,
    Resolved,
    Revision,
)
from vlm_operator.state.owners import controller, is_pod_of, names_of, owned_by, parted
from vlm_operator.state.pod_stats import (
    ItlHistogram,
    KvTokens,
    ModelFacts,
    Phase,
    Sample,
    StageSeconds,
    Ttft,
    WorkCounters,
)

__all__ = [
    "ANNOTATION_APPLIED",
    "ANNOTATION_DELETION_COST",
    "ANNOTATION_FAILED",
    "ANNOTATION_INITIAL",
    "ANNOTATION_INPUTS",
    "ANNOTATION_RESOLVED",
    "ContainerState",
    "DeploymentState",
    "ItlHistogram",
    "Key",
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
    "WorkCounters",
    "controller",
    "error_line",
    "is_pod_of",
    "names_of",
    "one_line",
    "owned_by",
    "parted",
]
