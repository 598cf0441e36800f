"""A Pod of the API server as the gateway reads it. Pure.

A pod may get requests when it is not being deleted, its containers are ready, and the readiness
gate `triptych.dev/accepting` is not False. The Pod's own Ready condition says less: it is False too
while the gate merely has not been set yet.

A pod is of the service if a ReplicaSet controls it and it has the service's compat. A label of the
service alone does not make it one. Those who may create pods can forge all of it (SECURITY.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

GRPC_PORT = 9000
SERVICE_LABEL = "triptych.dev/service"
ROLE_LABEL = "triptych.dev/role"
COMPAT_LABEL = "triptych.dev/compat"
ACCEPTING_GATE = "triptych.dev/accepting"
WORKER_ROLES = frozenset({"encoder", "prefill", "decode"})


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPod:
    """Where a worker is, and whether the cluster lets it have requests."""

    name: str
    address: str
    ready: bool = True
    accepting: bool = True


def known_pod(pod: Mapping[str, Any], *, compat: str) -> KnownPod | None:
    """A worker pod; None where it is none, has no address yet, or is of another compat set.

    A pod without a compat label is of another set.
    """
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    labels = _part(metadata, "labels")
    ip = status.get("podIP")
    if labels.get(ROLE_LABEL) not in WORKER_ROLES or not isinstance(ip, str) or not ip:
        return None
    if labels.get(COMPAT_LABEL) != compat:
        return None
    if not any(_is_controller(owner) for owner in metadata.get("ownerReferences") or ()):
        return None
    conditions = {
        c.get("type"): c.get("status")
        for c in status.get("conditions") or ()
        if isinstance(c, Mapping)
    }
    deleted = metadata.get("deletionTimestamp") is not None
    host = f"[{ip}]" if ":" in ip else ip
    return KnownPod(
        name=str(metadata.get("name", "")),
        address=f"{host}:{GRPC_PORT}",
        ready=conditions.get("ContainersReady") == "True",
        # A pod that goes may still be the last one that can serve: it drains.
        accepting=not deleted and conditions.get(ACCEPTING_GATE) != "False",
    )


def _is_controller(owner: Any) -> bool:
    """Whether a Deployment's ReplicaSet made the pod; a pod made by hand has no controller."""
    return (
        isinstance(owner, Mapping)
        and owner.get("controller") is True
        and owner.get("kind") == "ReplicaSet"
        and str(owner.get("apiVersion", "")).startswith("apps/")
    )


def _part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = value.get(name)
    return part if isinstance(part, Mapping) else {}
