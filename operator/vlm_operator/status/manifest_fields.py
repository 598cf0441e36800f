"""Maps a pod to its manifest: its devices, and the fields that name objects it refers to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlm_operator.api import VLMService
from vlm_operator.names import Role
from vlm_operator.state import PodState
from vlm_operator.status.causes import Place, Reference

_CLAIM = "PersistentVolumeClaim"
# Key of the manifest → kind of the object that it names, and the key of the name below it.
_NAMING = {
    "secretRef": ("Secret", "name"),
    "credentialsSecretRef": ("Secret", "name"),
    "secretKeyRef": ("Secret", "name"),
    "secret": ("Secret", "secretName"),
    "configMapRef": ("ConfigMap", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": (_CLAIM, "claimName"),
}


def field_of(service: VLMService, pod: PodState, fields: Mapping[Reference, str]) -> Place:
    """Return the place of one pod; `fields` is the result of `references`."""
    pool = None if pod.role is Role.GATEWAY else service.spec.pools.of(pod.role)
    devices = {item.name: item.accelerators() for item in pool.variants} if pool else {}
    return Place(pod.role, devices.get(pod.variant, 0), fields)


def references(spec: Mapping[str, Any]) -> dict[Reference, str]:
    """Return the field of a manifest's spec that names each Secret, ConfigMap or claim."""
    found: dict[Reference, str] = {}
    for kind, name, path in _walk(spec, ""):
        found.setdefault((kind, name), path)
    uri = str(spec.get("model", {}).get("uri", ""))
    if uri.startswith("pvc://"):
        found[_CLAIM, uri.removeprefix("pvc://").partition("/")[0]] = "model.uri"
    return found


def _walk(node: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            here = f"{path}.{key}" if path else str(key)
            kind, name = _NAMING.get(key, ("", ""))
            if kind and isinstance(value, Mapping) and value.get(name):
                yield kind, str(value[name]), here
            yield from _walk(value, here)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            label = value.get("name", number) if isinstance(value, Mapping) else number
            yield from _walk(value, f"{path}[{label}]")
