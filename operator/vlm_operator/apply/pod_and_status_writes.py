"""Writes what the plan does not contain: pods' gates, status, finalizers, memory, Events."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.apply.objects import check_owner
from vlm_operator.cluster import CONFIG_MAP, EVENT, POD, VLM_SERVICE, Cluster, Manifest, timestamp
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.metrics import WRITES
from vlm_operator.plan.deployments import owner_reference
from vlm_operator.pods.parts import object_labels
from vlm_operator.rollout.drain import PodPatch
from vlm_operator.state import ANNOTATION_DELETION_COST
from vlm_operator.status.events import Event

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
        meta: Manifest = {"name": patch.pod, "namespace": namespace, "uid": patch.uid}
        pod = {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": meta}
        try:
            if patch.accepting is not None:
                condition = {
                    "type": names.GATE_ACCEPTING,
                    "status": "True" if patch.accepting else "False",
                    "lastTransitionTime": timestamp(now),
                    "reason": patch.reason,
                }
                gate = {**pod, "status": {"conditions": [condition]}}
                await cluster.apply(gate, manager=names.MANAGER, subresource="status")
                WRITES.labels(kind=POD.kind, verb="status").inc()
                written += 1
                logger.info("gate", extra={"pod": patch.pod, "accepting": patch.accepting})
            if patch.cost is not None:
                notes = {ANNOTATION_DELETION_COST: str(patch.cost)} if patch.cost else None
                cost = {**pod, "metadata": {**meta, "annotations": notes} if notes else meta}
                await cluster.apply(cost, manager=names.MANAGER)
                WRITES.labels(kind=POD.kind, verb="apply").inc()
                written += 1
        except ClusterError as error:
            # 409: another pod has its name. 404, 422: the pod was deleted; an apply would create
            # one, which fails for lack of a spec
            if error.status not in (404, 409, 422):
                raise
    return written


async def write_status(
    cluster: Cluster, subject: Manifest, status: Manifest, *, manager: str = names.MANAGER_STATUS
) -> None:
    """Write the whole status of the object that `subject` names; its uid is a precondition."""
    meta = subject["metadata"]
    manifest = {
        "apiVersion": subject["apiVersion"],
        "kind": subject["kind"],
        "metadata": {key: meta[key] for key in ("name", "namespace", "uid") if key in meta},
        "status": status,
    }
    await cluster.apply(manifest, manager=manager, subresource="status")
    WRITES.labels(kind=subject["kind"], verb="status").inc()


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


async def save_memory(
    cluster: Cluster, service: VLMService, part: str, data: dict[str, str]
) -> None:
    """Write one of the loop's ConfigMaps: `<svc>-autoscaler` or `<svc>-state`.

    Raises:
        NameConflictError: a ConfigMap of that name is not controlled by the service.
    """
    name = names.child(service.name, part)
    live = await cluster.get(CONFIG_MAP, service.namespace, name)
    check_owner(live, (CONFIG_MAP.kind, name), service.uid)
    manifest = {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": object_labels(service.name, part),
            "ownerReferences": [owner_reference(service)],
        },
        "data": data,
    }
    await cluster.apply(manifest, manager=names.MANAGER_AUTOSCALER)
    WRITES.labels(kind=CONFIG_MAP.kind, verb="apply").inc()


async def post_events(
    cluster: Cluster, events: Iterable[Event], about: Manifest, *, now: float
) -> None:
    """Write one Event per transition of a VLMService; if it recurs, its count grows.

    Refused Events are dropped: the status has the state. If the API server is unavailable, the
    rest is dropped. `now` is in seconds since the epoch.
    """
    subject = {key: about["metadata"][key] for key in ("namespace", "name", "uid")}
    moment = timestamp(now)
    for event in events:
        text = f"{subject['uid']}/{event.reason}/{event.message}"
        title = f"{subject['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            live = await cluster.get(EVENT, subject["namespace"], title) or {}
            manifest = {
                "apiVersion": EVENT.api_version,
                "kind": EVENT.kind,
                "metadata": {"name": title, "namespace": subject["namespace"]},
                "involvedObject": {
                    "apiVersion": VLM_SERVICE.api_version,
                    "kind": VLM_SERVICE.kind,
                    **subject,
                },
                "type": "Warning" if event.warning else "Normal",
                "reason": event.reason,
                "message": event.message,
                "source": {"component": names.MANAGER},
                "firstTimestamp": live.get("firstTimestamp", moment),
                "lastTimestamp": moment,
                "count": int(live.get("count", 0)) + 1,
            }
            await cluster.apply(manifest, manager=names.MANAGER)
            WRITES.labels(kind=EVENT.kind, verb="apply").inc()
        except UnavailableError:
            return
        except ClusterError:
            continue
