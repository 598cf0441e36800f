"""What a revision is, and what stands of it on Deployments."""

from __future__ import annotations

import dataclasses

from vlm_operator import names
from vlm_operator.names import Role

# On each Deployment: what its revision was made of, so that a new operator renders the same pods.
ANNOTATION_INPUTS = f"{names.GROUP}/inputs"
ANNOTATION_RESOLVED = f"{names.GROUP}/resolved"
# On Deployments of a rollout: what an old one had at first, why a new one is not tried again.
ANNOTATION_INITIAL = f"{names.GROUP}/initial"
ANNOTATION_FAILED = f"{names.GROUP}/failed"
STAGES_FLAG = "--stages="
BIND_FLAG = "--bind="
# Kubernetes' own: pods with a lower one go first when a Deployment shrinks.
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
# On each child: the digest of what was last applied.
ANNOTATION_APPLIED = f"{names.GROUP}/applied"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a revision settled beside the manifest. A new operator keeps it, so no pod restarts.

    Attributes:
        base: digest of what the whole service must agree on; another one is another revision.
        image: for roles that name none.
        block_size: tokens of one KV block.
        compat: pods with the same value may work together.
        drain_seconds: of each role when its revision was made; a change alone restarts nothing.
        template: version of the pod template.
        pull_policy: imagePullPolicy as the operator's settings were; "" leaves Kubernetes' default,
            None is a Deployment of version 0.1, which stored neither this nor `bind`.
        bind: address that the pods listen on, as the settings were.
    """

    base: str
    image: str
    block_size: int
    compat: str
    drain_seconds: int
    template: int = 1
    pull_policy: str | None = None
    bind: str | None = None


@dataclasses.dataclass(frozen=True)
class Revision:
    """One role and variant, as its pods are to be."""

    role: Role
    variant: str
    id: str
    inputs: str
    resolved: Resolved
