"""A Deployment as decisions see it: one role, variant and revision."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from vlm_operator import names
from vlm_operator.names import Role
from vlm_operator.state.revisions import (
    ANNOTATION_FAILED,
    ANNOTATION_INITIAL,
    ANNOTATION_INPUTS,
    ANNOTATION_RESOLVED,
    STAGES_FLAG,
)

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DeploymentState:
    """One Deployment: one role, variant and revision.

    Attributes:
        available: pods that are ready, and have been for `minReadySeconds`.
        stages: what its workers load; empty where nobody said.
        initial: what it had when a rollout first took some of it; None before that.
        failed: why its revision is not tried again, "" where it is.
        created: seconds since the epoch.
    """

    name: str
    role: Role
    variant: str
    revision: str
    compat: str
    inputs: str
    resolved: str
    desired: int
    replicas: int
    ready: int
    deleting: bool
    available: int = 0
    stages: frozenset[str] = frozenset()
    initial: int | None = None
    failed: str = ""
    created: float = 0.0

    @classmethod
    def of(cls, manifest: Manifest) -> DeploymentState:
        """Read a manifest that carries the service's labels."""
        meta, status = manifest["metadata"], manifest.get("status", {})
        labels, notes = meta.get("labels", {}), meta.get("annotations", {})
        return cls(
            name=meta["name"],
            role=Role(labels[names.LABEL_ROLE]),
            variant=labels.get(names.LABEL_VARIANT, ""),
            revision=labels.get(names.LABEL_REVISION, ""),
            compat=labels.get(names.LABEL_COMPAT, ""),
            inputs=notes.get(ANNOTATION_INPUTS, ""),
            resolved=notes.get(ANNOTATION_RESOLVED, ""),
            desired=int(manifest["spec"].get("replicas", 1)),
            replicas=int(status.get("replicas", 0)),
            ready=int(status.get("readyReplicas", 0)),
            deleting=meta.get("deletionTimestamp") is not None,
            available=int(status.get("availableReplicas", 0)),
            stages=_stages(manifest),
            initial=int(noted)
            if (noted := notes.get(ANNOTATION_INITIAL, "")).isdecimal()
            else None,
            failed=notes.get(ANNOTATION_FAILED, ""),
            created=_seconds(meta.get("creationTimestamp")),
        )


def _stages(manifest: Manifest) -> frozenset[str]:
    """Read the stages off the command line of a worker."""
    pod = manifest["spec"].get("template", {}).get("spec", {})
    for container in pod.get("containers", []):
        for argument in container.get("args", []):
            if argument.startswith(STAGES_FLAG):
                return frozenset(argument.removeprefix(STAGES_FLAG).split(","))
    return frozenset()


def _seconds(moment: str | None) -> float:
    return 0.0 if moment is None else datetime.datetime.fromisoformat(moment).timestamp()
