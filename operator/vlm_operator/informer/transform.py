"""Reduces objects to the fields that decisions read, so that a cache needs less memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator.cluster import NODE, POD, VLM_POOL, Kind, Manifest
from vlm_operator.state import ANNOTATION_DELETION_COST

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "ownerReferences",
)
_POD_STATUS = ("phase", "podIP")
_CONDITION = ("type", "status", "lastTransitionTime", "message")
_CONTAINER = ("ready", "restartCount", "state", "lastState")


def transform(kind: Kind, item: Manifest) -> Manifest:
    """Return the part of an object that the store keeps.

    Only VLMPools keep `managedFields`. Pods keep the fields that `observe` reads. Nodes keep
    labels, readiness and allocatable resources; their image lists, most of their size, are dropped.
    """
    if kind == POD:
        return _pod(item)
    if kind == NODE:
        return _node(item)
    if kind == VLM_POOL:
        return item
    meta = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    return {**item, "metadata": meta}


def _pod(item: Manifest) -> Manifest:
    meta, spec, status = item["metadata"], item.get("spec", {}), item.get("status", {})
    cost = meta.get("annotations", {}).get(ANNOTATION_DELETION_COST)
    notes = {} if cost is None else {"annotations": {ANNOTATION_DELETION_COST: cost}}
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {**_some(meta, _META), **notes},
        "spec": {
            **_some(spec, ("nodeName",)),
            "containers": [_some(one, ("resources",)) for one in spec.get("containers", [])],
        },
        "status": {
            **_some(status, _POD_STATUS),
            "conditions": [_some(one, _CONDITION) for one in status.get("conditions", [])],
            "initContainerStatuses": _containers(status.get("initContainerStatuses", [])),
            "containerStatuses": _containers(status.get("containerStatuses", [])),
        },
    }


def _node(item: Manifest) -> Manifest:
    status = item.get("status", {})
    conditions = [
        {"type": one["type"], "status": one["status"]}
        for one in status.get("conditions", [])
        if one["type"] == "Ready"
    ]
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": _some(item["metadata"], _META),
        "spec": _some(item.get("spec", {}), ("unschedulable",)),
        "status": {**_some(status, ("allocatable",)), "conditions": conditions},
    }


def _containers(statuses: Iterable[Mapping[str, Any]]) -> list[Manifest]:
    return [_some(one, _CONTAINER) for one in statuses]


def _some(found: Mapping[str, Any], keys: tuple[str, ...]) -> Manifest:
    return {key: found[key] for key in keys if key in found}
