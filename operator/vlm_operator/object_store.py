"""Objects of one kind in one namespace or in all, never older than our own writes. Pure.

Objects come from lists, from events of a watch, and from answers to our own writes. Resource
versions of one kind are increasing numbers: Kubernetes guarantees it since 1.35, etcd always did.
So the newest version is kept, in whatever order they arrive:

event older than the held object       ignored: the answer to our write arrived before it
unknown object, older than the watch   ignored: the watch has already reported its deletion
held, not in a list, and not newer     removed
deleted by us                          hidden until an event reports that it is terminating or gone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import NODE, POD, VLM_POOL, Kind, Manifest
from vlm_operator.state import ANNOTATION_DELETION_COST

Service = tuple[str, str]  # namespace and name
_Key = tuple[str, str]  # namespace and name of an object

# fields of objects that decisions read
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


@dataclasses.dataclass(frozen=True)
class _Held:
    version: int
    item: Manifest

    @property
    def uid(self) -> str:
        return str(self.item["metadata"]["uid"])


class Store:
    """Objects of one kind, indexed by the service in their label. One event loop writes it.

    Returned objects are shared: callers must not change them.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._held: dict[_Key, _Held] = {}
        self._of: dict[Service, set[_Key]] = {}  # keys by the service in the label
        self._deleted: set[str] = set()  # uids of objects that we deleted
        self.version = 0  # of the newest list, event or bookmark

    def __len__(self) -> int:
        """Return the number of held objects, hidden ones included."""
        return len(self._held)

    def list(self, namespace: str | None, labels: Mapping[str, str]) -> list[Manifest]:
        """Return objects with `labels`, in one namespace or all, by namespace and name."""
        service = labels.get(names.LABEL_SERVICE)
        if service is not None and namespace is not None:
            keys: Iterable[_Key] = self._of.get((namespace, service), ())
        else:
            keys = self._held
        entries = (self._held[key] for key in sorted(keys) if namespace in (None, key[0]))
        return [
            held.item for held in entries if not self._hidden(held) and _carries(held.item, labels)
        ]

    def page(self, items: Iterable[Manifest]) -> set[Service]:
        """Add one page of a list; returns the services whose objects changed."""
        return {one for item in items for one in self._take(item)}

    def only(self, uids: Collection[str], version: int) -> set[Service]:
        """Remove objects that a list at `version` lacks; returns the services that had them."""
        gone = [
            key
            for key, held in self._held.items()
            if held.uid not in uids and held.version <= version
        ]
        services = {one for key in gone for one in self._remove(key)}
        self._deleted &= {held.uid for held in self._held.values()}
        self.advance(version)
        return services

    def changed(self, item: Manifest) -> set[Service]:
        """Add the object of an event; returns the services whose objects changed."""
        self.advance(int(item["metadata"]["resourceVersion"]))
        return self._take(item)

    def gone(self, item: Manifest) -> set[Service]:
        """Remove an object that was deleted or lost its label; returns the services that had it."""
        meta = item["metadata"]
        version = int(meta["resourceVersion"])
        self.advance(version)
        self._deleted.discard(meta["uid"])
        held = self._held.get(_key(item))
        if held is None or held.version > version:
            return set()
        return self._remove(_key(item))

    def advance(self, version: int) -> None:
        """Record that all events up to a version have arrived."""
        self.version = max(self.version, version)

    def written(self, answer: Manifest) -> None:
        """Add the API server's answer to one of our writes, unless it is outdated."""
        unknown = _key(answer) not in self._held
        if unknown and int(answer["metadata"]["resourceVersion"]) <= self.version:
            return
        self._take(answer)

    def deleted(self, uid: str) -> None:
        """Record that we deleted an object, which hides it."""
        self._deleted.add(uid)

    def _take(self, item: Manifest) -> set[Service]:
        key, version = _key(item), int(item["metadata"]["resourceVersion"])
        held = self._held.get(key)
        if held is not None and version <= held.version:
            return set()
        before = set() if held is None else self._remove(key)
        self._held[key] = _Held(version, transform(self._kind, item))
        services = _services(item)
        for service in services:
            self._of.setdefault(service, set()).add(key)
        return before | services

    def _remove(self, key: _Key) -> set[Service]:
        services = _services(self._held.pop(key).item)
        for service in services:
            self._of[service].discard(key)
            if not self._of[service]:
                del self._of[service]
        return services

    def _hidden(self, held: _Held) -> bool:
        return held.uid in self._deleted and "deletionTimestamp" not in held.item["metadata"]


def _key(item: Manifest) -> _Key:
    meta = item["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _services(item: Manifest) -> set[Service]:
    meta = item["metadata"]
    service = meta.get("labels", {}).get(names.LABEL_SERVICE)
    return set() if service is None else {(meta["namespace"], service)}


def _carries(item: Manifest, labels: Mapping[str, str]) -> bool:
    have = item["metadata"].get("labels", {})
    return all(have.get(key) == value for key, value in labels.items())


def transform(kind: Kind, item: Manifest) -> Manifest:
    """Return the part of an object that decisions read, so that the store needs less memory.

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


def _some(fields: Mapping[str, Any], keys: tuple[str, ...]) -> Manifest:
    return {key: fields[key] for key in keys if key in fields}
