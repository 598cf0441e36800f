"""Writes what the plan does not contain: pods' gates, status, finalizers, memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from vlm_operator import names
from vlm_operator.apply.objects import check_owner
from vlm_operator.cluster import CONFIG_MAP, POD, VLM_SERVICE, Cluster, Manifest, timestamp
from vlm_operator.errors import ClusterError, ConflictError
from vlm_operator.metrics import WRITES
from vlm_operator.rollout.drain import PodPatch
from vlm_operator.state import ANNOTATION_DELETION_COST

logger = logging.getLogger(__name__)
MEMORY_KEY = "memory.json"


async def apply_pod_patches(
    cluster: Cluster, pod_patches: Iterable[PodPatch], *, namespace: str, now: float
) -> int:
    """Write pods' gates and deletion costs; returns the number of writes.

    `now`, in seconds since the epoch, becomes the gates' `lastTransitionTime`.
    """
    written = 0
    for patch in pod_patches:
        # the pod was deleted, or another pod has its name: nothing to write
        with contextlib.suppress(ConflictError, _GoneError):
            if patch.accepting is not None:
                await _pod(cluster, _gate_manifest(patch, namespace, now), "status")
                written += 1
                logger.info("gate", extra={"pod": patch.pod, "accepting": patch.accepting})
            if patch.cost is not None:
                await _pod(cluster, _cost_manifest(patch, namespace), "")
                written += 1
    return written


async def apply_status(
    cluster: Cluster, *, namespace: str, name: str, uid: str, status: Manifest
) -> None:
    """Write a VLMService's whole status in one apply; `uid` is a precondition."""
    manifest = {
        "apiVersion": VLM_SERVICE.api_version,
        "kind": VLM_SERVICE.kind,
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "status": status,
    }
    await cluster.apply(manifest, manager=names.MANAGER_STATUS, subresource="status")
    WRITES.labels(kind=VLM_SERVICE.kind, verb="status").inc()


async def write_finalizers(
    cluster: Cluster, service: Manifest, finalizers: Iterable[str], *, manager: str = names.MANAGER
) -> Manifest:
    """Replace the finalizers of a VLMService as it was read; returns the object.

    A merge patch, because an apply cannot remove an item of another field manager: in earlier
    releases kopf added the finalizer.

    Raises:
        ConflictError: the object changed since it was read.
    """
    about = ("name", "namespace", "uid", "resourceVersion")
    meta = {key: service["metadata"][key] for key in about}
    manifest = {
        "apiVersion": VLM_SERVICE.api_version,
        "kind": VLM_SERVICE.kind,
        "metadata": {**meta, "finalizers": list(finalizers)},
    }
    answer = await cluster.merge(manifest, manager=manager)
    WRITES.labels(kind=VLM_SERVICE.kind, verb="merge").inc()
    return answer


async def apply_pool_status(cluster: Cluster, pool: Manifest, *, status: Manifest) -> None:
    """Write the status of the VLMPool that `pool` names; its uid, if given, is a precondition."""
    manifest = {
        "apiVersion": pool["apiVersion"],
        "kind": pool["kind"],
        "metadata": {
            key: value
            for key, value in pool["metadata"].items()
            if key in ("name", "namespace", "uid")
        },
        "status": status,
    }
    await cluster.apply(manifest, manager=names.MANAGER_STATUS, subresource="status")
    WRITES.labels(kind=pool["kind"], verb="status").inc()


async def save_memory(
    cluster: Cluster,
    *,
    namespace: str,
    name: str,
    owner: dict[str, Any],
    labels: dict[str, str],
    data: dict[str, str],
) -> None:
    """Write one of the loop's ConfigMaps: `<svc>-autoscaler` or `<svc>-state`.

    Raises:
        NameConflictError: a ConfigMap of that name is not controlled by `owner`.
    """
    live = await cluster.get(CONFIG_MAP, namespace, name)
    check_owner(live, (CONFIG_MAP.kind, name), owner["uid"])
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
        # an apply to a deleted pod would create one, which fails with 422 for lack of a spec
        if error.status in (404, 422):
            raise _GoneError from error
        raise


def _gate_manifest(patch: PodPatch, namespace: str, now: float) -> Manifest:
    condition = {
        "type": names.GATE_ACCEPTING,
        "status": "True" if patch.accepting else "False",
        "lastTransitionTime": timestamp(now),
        "reason": patch.reason,
    }
    return {**_pod_head(patch, namespace), "status": {"conditions": [condition]}}


def _cost_manifest(patch: PodPatch, namespace: str) -> Manifest:
    found = _pod_head(patch, namespace)
    if patch.cost:
        found["metadata"]["annotations"] = {ANNOTATION_DELETION_COST: str(patch.cost)}
    return found


def _pod_head(patch: PodPatch, namespace: str) -> Manifest:
    return {
        "apiVersion": POD.api_version,
        "kind": POD.kind,
        "metadata": {"name": patch.pod, "namespace": namespace, "uid": patch.uid},
    }
