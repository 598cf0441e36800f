"""The observed state: pods, their statistics, the objects of a service. Values only.

pod_stats.py    a pod's /stats                                          Sample
cluster_view.py pods, node classes, all objects of a service            Observed
deployments.py  revisions, and the Deployments that store them          DeploymentState, Revision
downloads.py    the claim and the Job of a revision of the model        DownloadState
owners.py       the owner of an object                                  owned_by, is_pod_of

`observe` and `scrape` build these values.
"""

from vlm_operator.cluster import Manifest
from vlm_operator.state.cluster_view import NodeClassState, Observed, PodState
from vlm_operator.state.deployments import (
    ANNOTATION_DELETION_COST,
    DeploymentState,
    Key,
    Resolved,
    Revision,
)
from vlm_operator.state.owners import owned_by
from vlm_operator.state.pod_stats import (
    ItlHistogram,
    KvTokens,
    Sample,
    StageSeconds,
    Ttft,
    WorkCounters,
)

__all__ = [
    "ANNOTATION_DELETION_COST",
    "DeploymentState",
    "ItlHistogram",
    "Key",
    "KvTokens",
    "Manifest",
    "NodeClassState",
    "Observed",
    "PodState",
    "Resolved",
    "Revision",
    "Sample",
    "StageSeconds",
    "Ttft",
    "WorkCounters",
    "owned_by",
]
