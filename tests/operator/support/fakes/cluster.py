"""An API server in memory, with the behaviour that an operator can observe.

It has uids, resource versions and generations, field managers, status subresources, finalizers
and garbage collection by owner; it refuses what the real one refuses of what we send. It has no
controllers: `testing.controllers` plays them when a test says so.
"""

from __future__ import annotations

import builtins
import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import Any

from support.fakes.fields import Fields
from support.fakes.stored import Stored
from vlm_operator.cluster import KINDS, Kind, Manifest, kind_of
from vlm_operator.errors import ClusterError, ConflictError, DiffersError, NamespaceEndsError

_STATUS = {"VLMService", "VLMPool", "Pod", "Deployment", "PersistentVolumeClaim", "Job"}
Key = tuple[str, str, str]  # kind, namespace, name


@dataclasses.dataclass
class Clock:
    """Seconds since the epoch, moved by hand."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        """Read it."""
        return self.now

    def stamp(self) -> str:
        """Read it as Kubernetes writes it."""
        moment = datetime.datetime.fromtimestamp(self.now, datetime.UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeCluster:
    """See `cluster.Cluster`.

    Attributes:
        writes: every change: verb, kind, name, manager.
        dry_runs: kind and name of each dry run.
        refused: kind and name of what was not created in them.
        ending: namespaces that are being deleted: nothing is created there.
        admission: called with each object that is about to be stored, and whether it is new: what
            the API server's defaults and mutating webhooks do.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.writes: list[tuple[str, str, str, str]] = []
        self.ending: set[str] = set()
        self.refused: list[tuple[str, str]] = []
        self.dry_runs: list[tuple[str, str]] = []
        self.admission: list[Callable[[Manifest, bool], None]] = []
        self._objects: dict[Key, Stored] = {}
        self.version = 0  # of the last change, anybody's
        self.made: list[Key] = []  # what came into being, in order

    # what the operator may do

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        found = self._objects.get((kind.kind, namespace if kind.namespaced else "", name))
        return None if found is None else found.render(kind)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """See `Cluster.list`."""
        return self.all(kind, namespace, labels)

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """See `Cluster.apply`."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        key = (kind.kind, meta.get("namespace", ""), meta["name"])
        found = self._objects.get(key)
        if found is None:
            if subresource:
                raise ClusterError(404, "NotFound", f"{kind.plural} {meta['name']} not found")
            if "uid" in meta:
                raise ConflictError(409, "Conflict", "Precondition failed: UID in precondition")
            if meta.get("namespace") in self.ending:
                self.refused.append((kind.kind, meta["name"]))
                text = f"unable to create new content in namespace {meta['namespace']} because it "
                raise NamespaceEndsError(403, "Forbidden", f"{text}is being terminated")
        elif "uid" in meta and meta["uid"] != found.meta["uid"]:
            raise ConflictError(409, "Conflict", "Precondition failed: UID in precondition")
        trial = self._new(kind, meta) if found is None else found.trial()
        before = dict(trial.fields.flat)
        changed = trial.fields.apply(
            self._body(kind, manifest, subresource), manager=manager, subresource=subresource
        )
        self._admit(kind, trial, new=found is None)
        trial.validate(kind, found)
        if dry_run:
            self.dry_runs.append((kind.kind, meta["name"]))
            return trial.render(kind)
        if changed or found is None or trial.fields.flat != before:
            self._store(key, trial, before)
            self.writes.append(("apply", kind.kind, meta["name"], manager))
        else:
            self._objects[key] = trial
        return trial.render(kind)

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """See `Cluster.merge`."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        found = self._objects.get((kind.kind, meta.get("namespace", ""), meta["name"]))
        if found is None:
            raise ClusterError(404, "NotFound", f"{kind.plural} {meta['name']} not found")
        if meta.get("uid", found.meta["uid"]) != found.meta["uid"]:
            raise ConflictError(409, "Conflict", "Precondition failed: UID in precondition")
        if (
            meta.get("resourceVersion", found.meta["resourceVersion"])
            != found.meta["resourceVersion"]
        ):
            raise ConflictError(409, "Conflict", "the object has been modified")

        def change(live: Manifest) -> None:
            merged = _merged(live, manifest)
            live.clear()
            live.update(merged)

        self.edit(kind, meta.get("namespace", ""), meta["name"], change, manager=manager)
        self.writes.append(("merge", kind.kind, meta["name"], manager))
        return found.render(kind)

    async def metadata_if(
        self, kind: Kind, namespace: str, name: str, expected: Mapping[str, str]
    ) -> Manifest | None:
        """See `Cluster.metadata_if`."""
        found = self._objects.get((kind.kind, namespace, name))
        if found is None:
            return None
        manifest = found.render(kind)
        for pointer, value in expected.items():
            if _at(manifest, pointer) != value:
                raise DiffersError(422, "Invalid", "the server rejected our request")
        return dict(manifest["metadata"])

    async def create(self, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        if (kind.kind, meta.get("namespace", ""), meta["name"]) in self._objects:
            raise ConflictError(409, "AlreadyExists", f"{kind.plural} {meta['name']} exists")
        self.writes.append(("create", kind.kind, meta["name"], "client"))
        return self.hardware(manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        key = (kind.kind, meta.get("namespace", ""), meta["name"])
        found = self._objects.get(key)
        if found is None:
            raise ClusterError(404, "NotFound", f"{kind.plural} {meta['name']} not found")
        if meta["resourceVersion"] != found.meta["resourceVersion"]:
            raise ConflictError(409, "Conflict", "the object has been modified")
        before = dict(found.fields.flat)
        found.fields.update(self._body(kind, manifest, ""), manager="client")
        self._store(key, found, before)
        self.writes.append(("replace", kind.kind, meta["name"], "client"))
        return found.render(kind)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """See `Cluster.delete`."""
        found = self._objects.get((kind.kind, namespace, name))
        if found is None:
            return
        if uid is not None and found.meta["uid"] != uid:
            raise ConflictError(409, "Conflict", "Precondition failed: UID in precondition")
        self.writes.append(("delete", kind.kind, name, "client"))
        self.remove(kind, namespace, name)

    # what others do

    def hardware(self, manifest: Manifest) -> Manifest:
        """Put an object there, as another client or a controller would."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        made = self._new(kind, meta)
        made.fields.update(self._body(kind, manifest, ""), manager="client")
        self._admit(kind, made, new=True)
        self._store((kind.kind, meta.get("namespace", ""), meta["name"]), made, {})
        return made.render(kind)

    def all(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> builtins.list[Manifest]:
        """Return all objects of a kind, by name."""
        found = []
        for (name, space, _), item in sorted(self._objects.items(), key=lambda pair: pair[0]):
            if name != kind.kind or (namespace is not None and space not in ("", namespace)):
                continue
            manifest = item.render(kind)
            have = manifest["metadata"].get("labels", {})
            if all(have.get(key) == value for key, value in (labels or {}).items()):
                found.append(manifest)
        return found

    def edit(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        change: Callable[[Manifest], None],
        *,
        manager: str = "kubectl",
    ) -> None:
        """Change an object, status included, as another client would."""
        key = (kind.kind, namespace, name)
        found = self._objects[key]
        manifest = found.render(kind)
        change(manifest)
        before = dict(found.fields.flat)
        body = self._body(kind, manifest, "")
        if "status" in manifest:
            body["status"] = manifest["status"]
        finalizers = manifest["metadata"].get("finalizers", [])
        released = finalizers != found.meta["finalizers"]
        found.meta["finalizers"] = finalizers
        found.written = ""
        if found.fields.update(body, manager=manager) or released:
            self._admit(kind, found, new=False)
            self._store(key, found, before)
        if not finalizers and "deletionTimestamp" in found.meta:
            self._collect(key)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete in the background: at once without finalizers, dependents afterwards."""
        key = (kind.kind, namespace, name)
        found = self._objects[key]
        if found.meta.get("finalizers"):
            if "deletionTimestamp" not in found.meta:
                found.meta["deletionTimestamp"] = self.clock.stamp()
                found.meta["generation"] += 1
                found.meta["resourceVersion"] = str(self._next())
                found.written = ""
            return
        self._collect(key)

    def _admit(self, kind: Kind, item: Stored, *, new: bool) -> None:
        if not self.admission:
            return
        item.written = ""
        manifest = item.render(kind)
        for webhook in self.admission:
            webhook(manifest, new)
        item.fields.rewrite({**self._body(kind, manifest, ""), **_status(manifest)})
        item.written = ""

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _collect(self, key: Key) -> None:
        gone = self._objects.pop(key)
        for other, item in list(self._objects.items()):
            owners = {
                step[1]
                for path in item.fields.flat
                for step in path
                if isinstance(step, tuple) and step[0] == "uid" and "ownerReferences" in path
            }
            if gone.meta["uid"] in owners and other in self._objects:
                kind = next(kind for kind in KINDS.values() if kind.kind == other[0])
                self.remove(kind, other[1], other[2])

    def _new(self, kind: Kind, meta: Mapping[str, Any]) -> Stored:
        number = self._next()
        return Stored(
            Fields(),
            {
                "name": meta["name"],
                **({"namespace": meta["namespace"]} if kind.namespaced else {}),
                "uid": f"uid-{number}",
                "creationTimestamp": self.clock.stamp(),
                "generation": 1,
                "resourceVersion": str(number),
                "finalizers": list(meta.get("finalizers", [])),
            },
        )

    def _store(self, key: Key, item: Stored, before: Mapping[Any, Any]) -> None:
        def spec(flat: Mapping[Any, Any]) -> dict[Any, Any]:
            return {path: value for path, value in flat.items() if path and path[0] == "spec"}

        if before and spec(before) != spec(item.fields.flat):
            item.meta["generation"] += 1
        item.meta["resourceVersion"] = str(self._next())
        item.written = ""
        if key not in self._objects:
            self.made.append(key)
        self._objects[key] = item

    def _body(self, kind: Kind, manifest: Manifest, subresource: str) -> Manifest:
        """What of a manifest counts: fields of the subresource, no identity."""
        if subresource == "status":
            return {"status": manifest.get("status", {})}
        meta = {
            key: value
            for key, value in manifest["metadata"].items()
            if key in ("labels", "annotations", "ownerReferences") and value
        }
        skipped = {"apiVersion", "kind", "metadata"} | (
            {"status"} if kind.kind in _STATUS else set()
        )
        body = {key: value for key, value in manifest.items() if key not in skipped}
        return {**body, **({"metadata": meta} if meta else {})}


def _merged(live: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    base = dict(live) if isinstance(live, Mapping) else {}
    merged = {**base, **{key: _merged(base.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _at(manifest: Any, pointer: str) -> Any:
    node = manifest
    for part in pointer.split("/")[1:]:
        try:
            node = node[int(part) if isinstance(node, builtins.list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return node


def _status(manifest: Manifest) -> Manifest:
    return {"status": manifest["status"]} if "status" in manifest else {}
