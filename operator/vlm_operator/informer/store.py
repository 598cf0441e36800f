"""What is known of one kind in one place, never older than what was written here. Pure.

Three sources meet: a list, the events of a watch, and the answers of our own writes. Versions of
one kind are numbers that grow (Kubernetes says so since 1.35, etcd always did), so the newer one
wins whatever came first:

event older than what is held          nothing: our own write's answer was here before it
answer older than the watch            nothing: the watch has told of it, or of its end
held, not in a list, and not newer     gone
deleted by us                          hidden until an event says that it is on its way out or gone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from vlm_operator import names
from vlm_operator.cluster import Kind, Manifest
from vlm_operator.informer.kept import kept

Service = tuple[str, str]  # namespace and name
_Key = tuple[str, str]  # of an object, likewise


@dataclasses.dataclass(frozen=True)
class _Held:
    version: int
    item: Manifest

    @property
    def uid(self) -> str:
        return str(self.item["metadata"]["uid"])


class Store:
    """Objects of one kind, by the service whose label they carry. One event loop writes it.

    What is handed out is shared: readers change nothing in it.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._held: dict[_Key, _Held] = {}
        self._of: dict[Service, set[_Key]] = {}  # what carries a service's label
        self._deleted: set[str] = set()  # uids
        self._told = 0  # the version up to which lists and events have come

    def __len__(self) -> int:
        """How many objects are held."""
        return len(self._held)

    @property
    def version(self) -> int:
        """The version up to which lists, events and bookmarks have come."""
        return self._told

    def list(self, namespace: str | None, labels: Mapping[str, str]) -> list[Manifest]:
        """Return what carries `labels`, in one namespace or everywhere, by name."""
        service = labels.get(names.LABEL_SERVICE)
        if service is not None and namespace is not None:
            keys: Iterable[_Key] = self._of.get((namespace, service), ())
        else:
            keys = self._held
        found = (self._held[key] for key in sorted(keys) if namespace in (None, key[0]))
        return [
            held.item for held in found if not self._hidden(held) and _carries(held.item, labels)
        ]

    def page(self, items: Iterable[Manifest]) -> set[Service]:
        """Take in a part of a list; returns whose loops should hear of it."""
        return {one for item in items for one in self._take(item)}

    def only(self, uids: Collection[str], version: int) -> set[Service]:
        """Forget what a list, as things were at `version`, does not name; returns whose it was."""
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
        """Take in an event that shows an object; returns whose loops should hear of it."""
        self.advance(int(item["metadata"]["resourceVersion"]))
        return self._take(item)

    def gone(self, item: Manifest) -> set[Service]:
        """Take in an event that says that an object is gone, or lost its label."""
        meta = item["metadata"]
        version = int(meta["resourceVersion"])
        self.advance(version)
        self._deleted.discard(meta["uid"])
        held = self._held.get(_key(item))
        if held is None or held.version > version:
            return set()
        return self._remove(_key(item))

    def advance(self, version: int) -> None:
        """Note that all events up to a version have come."""
        self._told = max(self._told, version)

    def written(self, answer: Manifest) -> None:
        """Take in what the API server answered to a write of ours."""
        unknown = _key(answer) not in self._held
        if unknown and int(answer["metadata"]["resourceVersion"]) <= self._told:
            return
        self._take(answer)

    def deleted(self, uid: str) -> None:
        """Note that we deleted an object."""
        self._deleted.add(uid)

    def _take(self, item: Manifest) -> set[Service]:
        key, version = _key(item), int(item["metadata"]["resourceVersion"])
        held = self._held.get(key)
        if held is not None and version <= held.version:
            return set()
        before = set() if held is None else self._remove(key)
        self._held[key] = _Held(version, kept(self._kind, item))
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
