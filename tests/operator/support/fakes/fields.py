"""Server-side apply over flattened manifests.

A manifest becomes {path: value}; items of a keyed list are addressed by their key, every other
list is one value. A manager owns the paths that it applied last: what it no longer applies goes,
unless somebody else owns it too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[str | tuple[str, Any], ...]
Flat = dict[Path, Any]

# Lists that Kubernetes merges by a key; by the name of the field that holds them.
_KEYED = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
    "conditions": "type",
    "usage": "operator",
}


def flatten(value: Any, path: Path = ()) -> Flat:
    """Write a manifest as one value per path; empty maps are values too."""
    if isinstance(value, Mapping) and value:
        found: Flat = {}
        for key, item in value.items():
            found |= flatten(item, (*path, str(key)))
        return found
    key = _KEYED.get(str(path[-1])) if path else None
    if key is not None and isinstance(value, list) and value:
        found = {}
        for item in value:
            found |= flatten(item, (*path, (key, item[key])))
        return found
    return {path: copy.deepcopy(value)}


def unflatten(flat: Mapping[Path, Any]) -> Any:
    """Write paths as a manifest again; keyed lists keep the order in which items came."""
    if () in flat:
        return copy.deepcopy(flat[()])
    groups: dict[str | tuple[str, Any], Flat] = {}
    for path, value in flat.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    if any(isinstance(step, tuple) for step in groups):
        return [unflatten(group) for group in groups.values()]
    return {str(step): unflatten(group) for step, group in groups.items()}


class Fields:
    """One object's fields, and who owns which. Its object is the only writer."""

    def __init__(self) -> None:
        self.flat: Flat = {}
        self.owners: dict[tuple[str, str], set[Path]] = {}

    def copy(self) -> Fields:
        """Return one that changes apart; values are never changed in place."""
        found = Fields()
        found.flat = dict(self.flat)
        found.owners = {owner: set(paths) for owner, paths in self.owners.items()}
        return found

    def apply(self, manifest: Mapping[str, Any], *, manager: str, subresource: str) -> bool:
        """Apply with force; return whether anything changed."""
        before = dict(self.flat)
        wanted = flatten(manifest)
        owner = (manager, subresource)
        dropped = self.owners.get(owner, set()) - set(wanted)
        kept = {path for name, paths in self.owners.items() if name != owner for path in paths}
        for path in dropped - kept:
            self.flat.pop(path, None)
        for path, value in wanted.items():
            if path not in self.flat or self.flat[path] != value:
                self._disown(path, owner)
                self._clear(path)
                self.flat[path] = value
        self.owners[owner] = set(wanted)
        return self.flat != before

    def update(self, manifest: Mapping[str, Any], *, manager: str, subresource: str = "") -> bool:
        """Replace everything, as an update does: changed paths become the manager's."""
        wanted = flatten(manifest)
        changed = {path for path, value in wanted.items() if self.flat.get(path) != value}
        gone = set(self.flat) - set(wanted)
        for paths in self.owners.values():
            paths.difference_update(changed | gone)
        if changed:
            self.owners.setdefault((manager, subresource), set()).update(changed)
        self.flat = wanted
        return bool(changed or gone)

    def rewrite(self, manifest: Mapping[str, Any]) -> None:
        """Replace everything in the name of nobody, as defaults and webhooks do."""
        self.flat = flatten(manifest)
        for paths in self.owners.values():
            paths.intersection_update(self.flat)

    def managed(self) -> list[dict[str, Any]]:
        """Return `metadata.managedFields`."""
        return [
            {"manager": manager, "subresource": subresource, "fieldsV1": _fields_v1(paths)}
            for (manager, subresource), paths in self.owners.items()
            if paths
        ]

    def _disown(self, path: Path, owner: tuple[str, str]) -> None:
        for name, paths in self.owners.items():
            if name != owner:
                paths.discard(path)

    def _clear(self, path: Path) -> None:
        """Remove what a value replaces: an empty map above it, or fields below it."""
        for length in range(1, len(path)):
            self.flat.pop(path[:length], None)
        for other in [key for key in self.flat if len(key) > len(path)]:
            if other[: len(path)] == path:
                del self.flat[other]


def _fields_v1(paths: Iterable[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in paths:
        node = found
        for step in path:
            name = f"f:{step}" if isinstance(step, str) else f'k:{{"{step[0]}":"{step[1]}"}}'
            node = node.setdefault(name, {})
    return found
