"""What a container runs: its image's command, arguments and environment. Pure.

image ─▶ entrypoint ┐
command, args ──────┴─▶ $(VAR) expanded ─▶ argv          env, envFrom, downward API ─▶ environment
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import ceil
from typing import Any

from vlm_operator.api import quantity

Images = Mapping[str, Sequence[str]]
IMAGE_USER = 65532  # of both Dockerfiles
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_EVERY_ADDRESS = ("--bind=::", "--bind=0.0.0.0")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class ConfigError(Exception):
    """The container refers to a missing object. A kubelet reports CreateContainerConfigError."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a pod that the downward API gives and the Pod object does not contain."""

    pod_ip: str
    host_ip: str
    node: str


def entrypoint(image: str, images: Images) -> Sequence[str] | None:
    """Return the command of an image, ignoring its registry and tag; None if it is unknown."""
    repository = image.partition("@")[0]
    head, slash, last = repository.rpartition("/")
    repository = head + slash + last.partition(":")[0]
    for name, command in images.items():
        if repository == name or repository.endswith(f"/{name}"):
            return command
    return None


def arguments(
    container: Mapping[str, Any], start: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return argv: `command` replaces the image's start, `args` follow, `$(VAR)` is filled in."""
    command = container.get("command") or start
    return [expand(word, environment) for word in [*command, *container.get("args", [])]]


def identity(container: Mapping[str, Any], pod: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the uid and gid that a container runs as; None for root.

    If the container must not run as root and names no uid, the result is the uid of our images.
    """
    context = {
        **(pod["spec"].get("securityContext") or {}),
        **(container.get("securityContext") or {}),
    }
    uid = context.get("runAsUser", IMAGE_USER if context.get("runAsNonRoot") else 0)
    return (uid, context.get("runAsGroup", uid)) if uid else None


def on_shared_network(argv: Sequence[str], pod_ip: str) -> list[str]:
    """Return argv with the pod's own address if it binds all addresses.

    The pods of a local cluster share one network namespace: with `::`, two of them would ask for
    the same port. On a real node, a pod binds the address in its flags.
    """
    return [f"--bind={pod_ip}" if word in _EVERY_ADDRESS else word for word in argv]


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Replace each `$(VAR)` that is known, and `$$` by a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else environment.get(name, match[0])

    return _REFERENCE.sub(replace, text)


def environment(
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    facts: Facts,
    *,
    base: Mapping[str, str],
    objects: Mapping[tuple[str, str], Mapping[str, str]],
) -> dict[str, str]:
    """Return the environment: `base`, then envFrom, then env in its order.

    `objects` are the data of each existing `("ConfigMap" | "Secret", name)`.

    Raises:
        ConfigError: a required object or key is missing, or a field path is unknown.
    """
    env = dict(base)
    for source in container.get("envFrom") or []:
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(field):
                data = objects.get((kind, reference["name"]))
                if data is None and not reference.get("optional"):
                    raise ConfigError(_missing(kind, reference["name"]))
                prefix = source.get("prefix", "")
                env |= {prefix + name: value for name, value in (data or {}).items()}
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            value = _value_from(entry["valueFrom"], container, pod, facts, objects)
        else:
            value = expand(entry.get("value", ""), env)
        if value is not None:
            env[entry["name"]] = value
    return env


def references(container: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the `(kind, name)` of each ConfigMap and Secret that the environment reads."""
    found = set()
    for source in container.get("envFrom") or []:
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(field):
                found.add((kind, reference["name"]))
    for entry in container.get("env") or []:
        for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
            if reference := entry.get("valueFrom", {}).get(field):
                found.add((kind, reference["name"]))
    return found


def pod_field(path: str, pod: Mapping[str, Any], facts: Facts) -> str:
    """Return one field of the downward API, such as `metadata.labels['app']`.

    Raises:
        ConfigError: there is no such field.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.fullmatch(path):
        return str(metadata.get(match[1], {}).get(match[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.partition(".")[2], {})
        return "\n".join(f'{name}="{value}"' for name, value in sorted(entries.items()))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": facts.node,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
    }
    if path not in values:
        raise ConfigError(f"fieldPath {path!r} is not supported by the downward API")
    return str(values[path])


def container_resource(reference: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    """Return a request or limit of the container in units of `divisor`, rounded up."""
    kind, _, name = reference["resource"].partition(".")
    value = container.get("resources", {}).get(kind, {}).get(name, "0")
    divisor = quantity.parse(str(reference.get("divisor", "1"))) or Decimal(1)
    return str(ceil(quantity.parse(str(value)) / divisor))


def _value_from(
    source: Mapping[str, Any],
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    facts: Facts,
    objects: Mapping[tuple[str, str], Mapping[str, str]],
) -> str | None:
    if "fieldRef" in source:
        return pod_field(source["fieldRef"]["fieldPath"], pod, facts)
    if "resourceFieldRef" in source:
        return container_resource(source["resourceFieldRef"], container)
    kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
    reference = source.get("configMapKeyRef") or source["secretKeyRef"]
    data = objects.get((kind, reference["name"]))
    if data is not None and reference["key"] in data:
        return data[reference["key"]]
    if reference.get("optional"):
        return None
    if data is None:
        raise ConfigError(_missing(kind, reference["name"]))
    where = f"{kind} {pod['metadata']['namespace']}/{reference['name']}"
    raise ConfigError(f"couldn't find key {reference['key']} in {where}")


def _missing(kind: str, name: str) -> str:
    """Return the error in the kubelet's words, which the operator parses."""
    return f'{kind.lower()} "{name}" not found'
