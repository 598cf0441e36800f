"""Revisions, and the annotations that store them on Deployments."""

from __future__ import annotations

import dataclasses

from vlm_operator import names
from vlm_operator.names import Role

# On each Deployment: inputs of its revision, so that another operator version renders equal pods.
ANNOTATION_INPUTS = f"{names.GROUP}/inputs"
ANNOTATION_RESOLVED = f"{names.GROUP}/resolved"
# On Deployments of a rollout: replicas of an old one before it; why a new one is not tried again.
ANNOTATION_INITIAL = f"{names.GROUP}/initial"
ANNOTATION_FAILED = f"{names.GROUP}/failed"
STAGES_FLAG = "--stages="
BIND_FLAG = "--bind="
# Defined by Kubernetes: if a ReplicaSet shrinks, pods with lower cost are deleted first.
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
# On each child: digest of the last applied manifest.
ANNOTATION_APPLIED = f"{names.GROUP}/applied"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Values of a revision that the manifest does not fix.

    The operator keeps them for existing revisions, so that its upgrade restarts no pod.

    Attributes:
        base: digest of the fields that all pods of the service share.
        image: image of roles whose pool names none.
        block_size: tokens per KV block.
        compat: pods with the same value may exchange KV and embeddings.
        drain_seconds: drain timeout at the creation of the revision. A change of the timeout
            alone restarts no pod.
        template: version of the pod template.
        pull_policy: imagePullPolicy from the operator's settings; "" leaves Kubernetes' default.
            None: a Deployment of version 0.1, which stored neither this field nor `bind`.
        bind: listen address of the pods, from the operator's settings.
    """

    base: str
    image: str
    block_size: int
    compat: str
    drain_seconds: int
    template: int = 2
    pull_policy: str | None = None
    bind: str | None = None


@dataclasses.dataclass(frozen=True)
class Revision:
    """The revision of one role and variant.

    Attributes:
        id: digest that names the revision.
        inputs: digest of the manifest fields that restart pods.
        resolved: values that the manifest does not fix.
    """

    role: Role
    variant: str
    id: str
    inputs: str
    resolved: Resolved
