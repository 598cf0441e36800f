"""Small writes beside the plan: pods' gates, the status, a pool's number, the memory."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterable
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import CONFIG_MAP, POD, VLM_SERVICE, Cluster, Manifest
from vlm_operator.errors import ClusterError, ConflictError
from vlm_operator.metrics import WRITES
from vlm_operator.rollout import Gate
from vlm_operator.state import ANNOTATION_DELETION_COST

logger = logging.getLogger(__name__)
MEMORY_KEY = "memory.json"


async def apply_gates(
    cluster: Cluster, gates: Iterable[Gate], *, namespace: str, now: float
) -> int:
    """Tell pods whether to take work, and which go first; returns how many writes it took.

    `now`, in seconds since the epoch, becomes the gates' `lastTransitionTime`.
    """
    written = 0
    for gate in gates:
        # a pod that is gone, or whose name another took, needs neither
        with contextlib.suppress(ConflictError, _GoneError):
            if gate.accepting is not None:
                await _pod(cluster, _gate_manifest(gate, namespace, now), "status")
                written += 1
                logger.info("gate", extra={"pod": gate.pod, "accepting": gate.accepting})
            if gate.cost is not None:
                await _pod(cluster, _cost_manifest(gate, namespace), "")
                written += 1
    return written


async def apply_status(
    cluster: Cluster, *, namespace: str, name: str, uid: str, status: Manifest
) -> None:
    """Write a VLMService's whole status at once."""
    manifest = {
        "apiVersion": VLM_SERVICE.api_version,
        "kind": VLM_SERVICE.kind,
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "status": status,
    }
    await cluster.apply(manifest, manager=names.MANAGER_STATUS, subresource="status")
    WRITES.labels(kind=VLM_SERVICE.kind, verb="status").inc()


async def apply_pool_status(cluster: Cluster, claim: Manifest, *, status: Manifest) -> None:
    """Write the status of the VLMPool that a claim names."""
    manifest = {
        "apiVersion": claim["apiVersion"],
        "kind": claim["kind"],
        "metadata": {key: claim["metadata"][key] for key in ("name", "namespace")},
        "status": status,
    }
    await cluster.apply(manifest, manager=names.MANAGER_STATUS, subresource="status")
    WRITES.labels(kind=claim["kind"], verb="status").inc()


async def save_memory(
    cluster: Cluster,
    *,
    namespace: str,
    name: str,
    owner: dict[str, Any],
    labels: dict[str, str],
    data: dict[str, str],
) -> None:
    """Write a ConfigMap of the loop's own: `<svc>-autoscaler` or `<svc>-state`."""
    manifest = {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels,
            "ownerReferences": [owner],
        },
        "data": data,
    }
    await cluster.apply(manifest, manager=names.MANAGER_AUTOSCALER)
    WRITES.labels(kind=CONFIG_MAP.kind, verb="apply").inc()


class _GoneError(Exception):
    """The pod does not exist any more."""


async def _pod(cluster: Cluster, manifest: Manifest, subresource: str) -> None:
    try:
        await cluster.apply(manifest, manager=names.MANAGER, subresource=subresource)
        WRITES.labels(kind=POD.kind, verb=subresource or "apply").inc()
    except ClusterError as error:
        # applying to a pod that is gone would create one, which its missing spec forbids
        if error.status in (404, 422):
            raise _GoneError from error
        raise


def _gate_manifest(gate: Gate, namespace: str, now: float) -> Manifest:
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": names.GATE_ACCEPTING,
        "status": "True" if gate.accepting else "False",
        "lastTransitionTime": moment,
        "reason": gate.reason,
    }
    return {**_pod_head(gate, namespace), "status": {"conditions": [condition]}}


def _cost_manifest(gate: Gate, namespace: str) -> Manifest:
    found = _pod_head(gate, namespace)
    if gate.cost:
        found["metadata"]["annotations"] = {ANNOTATION_DELETION_COST: str(gate.cost)}
    return found


def _pod_head(gate: Gate, namespace: str) -> Manifest:
    return {
        "apiVersion": POD.api_version,
        "kind": POD.kind,
        "metadata": {"name": gate.pod, "namespace": namespace, "uid": gate.uid},
    }
