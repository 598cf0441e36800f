"""The changes of a user to the pod template of a pool or of the gateway: `podTemplate`.

`metadata` has types. `spec` is any part of a PodSpec, merged as a strategic merge patch
(`pods/overlay.py`). `check` refuses what the operator must set itself. The API server validates the
merged template in a dry run before pods are created.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from vlm_operator.api.base import (
    ANNOTATION_KEY,
    AnnotationValue,
    LabelKey,
    Model,
    Open,
    Rule,
    field,
    keyed,
)
from vlm_operator.api.engine import OWNED_ENV, OWNED_ENV_PREFIX
from vlm_operator.api.placement import Labels, is_accelerator
from vlm_operator.errors import SpecError
from vlm_operator.names import Role

OWNED_LABEL_DOMAINS = ("triptych.dev/", "app.kubernetes.io/")
IDENTITY_PATH = "/var/run/triptych/identity"
OWNED_MOUNTS = (
    "/models", "/tmp", "/etc/triptych", "/var/run/triptych", "/embeddings",  # noqa: S108
    "/activation-scales",
)  # fmt: skip
OWNED_VOLUME_PREFIX = "triptych-"
LIST_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "claims": "name",
    "resourceClaims": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "readinessGates": "conditionType",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a PodSpec whose items are merged, and the key of an item. Other lists are replaced."""

Annotations = Annotated[
    dict[LabelKey, AnnotationValue], Field(max_length=32), keyed("annotation-keys", ANNOTATION_KEY)
]


class PodMetadata(Model):
    """Labels and annotations of pods."""

    labels: Labels = field(
        {}, "Labels in addition to those of the operator.", example={"team": "vision"}
    )
    annotations: Annotations = field(
        {}, "Annotations of the pods.", example={"example.com/note": "x"}
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="owned-labels",
            holds="!has(self.labels) || self.labels.all(k, "
            + " && ".join(f"!k.startsWith('{domain}')" for domain in OWNED_LABEL_DOMAINS)
            + ")",
            message=f"labels under {' and '.join(OWNED_LABEL_DOMAINS)} are the operator's: "
            "remove them",
            at=".labels",
        ),
    )


class PodTemplate(Model):
    """Changes to the pod template, merged as a strategic merge patch."""

    metadata: PodMetadata = field(PodMetadata(), "Labels and annotations of the pods.")
    spec: Open = field(
        {},
        "Part of a PodSpec: initContainers, sidecars, volumes, serviceAccountName, "
        "runtimeClassName, schedulerName, priorityClassName, resourceClaims. Change the operator's "
        "container under its name, worker, gateway or fetch. The operator refuses what it sets "
        "itself.",
        example={"priorityClassName": "inference"},
    )

    @property
    def is_empty(self) -> bool:
        return self == PodTemplate()


def check_pod_template(template: PodTemplate, role: Role | None, *, path: str) -> None:
    """Refuse a podTemplate that changes what the operator sets.

    Args:
        template: as the user wrote it.
        role: whose pods it changes; None for the Job that downloads the model.
        path: path of the podTemplate in the manifest.

    Raises:
        SpecError: names the field and what to write instead.
    """
    path = f"{path}.spec"
    spec = template.spec
    _check_shape(spec, path)
    for name, fix in _owned_in_pod(role).items():
        if name in spec:
            raise SpecError(f"{path}.{name}", f"is set by the operator: {fix}")
    for volume in spec.get("volumes") or ():
        if volume["name"].startswith(OWNED_VOLUME_PREFIX):
            raise SpecError(
                f"{path}.volumes[{volume['name']}]",
                f"names with {OWNED_VOLUME_PREFIX} are the operator's: choose another",
            )
    own = "fetch" if role is None else "gateway" if role is Role.GATEWAY else "worker"
    for kind, item in _containers(spec):
        where = f"{path}.{kind}[{item['name']}]"
        if kind == "containers" and item["name"] == own:
            _check_own_container(item, role, where)
        else:
            _check_devices(item, where)


def _owned_in_pod(role: Role | None) -> dict[str, str]:
    """Return the fields of a PodSpec that the operator sets, with what to do instead."""
    if role is None:
        fixed = ("restartPolicy", "enableServiceLinks", "automountServiceAccountToken")
        return dict.fromkeys((*fixed, "ephemeralContainers"), "remove it")
    gateway = role is Role.GATEWAY
    placement = "set gateway.placement" if gateway else "set placement of a variant"
    owned = {
        "nodeSelector": placement,
        "tolerations": placement,
        "affinity": placement,
        "nodeName": placement,
        "terminationGracePeriodSeconds": "set drain.timeoutSeconds",
        "restartPolicy": "remove it",
        "enableServiceLinks": "remove it",
        "ephemeralContainers": "remove it, and use kubectl debug",
    }
    if gateway:
        owned["automountServiceAccountToken"] = "remove it: a gateway watches pods"
    return owned


def _owned_in_container(role: Role | None) -> dict[str, str]:
    """Return the fields of the operator's container that it sets, with what to do instead."""
    if role is None:
        return dict.fromkeys(("image", "command", "args", "ports"), "remove it")
    gateway = role is Role.GATEWAY
    flags = "set the fields of gateway" if gateway else "set engine.extraArgs"
    return {
        "image": "set gateway.image" if gateway else f"set pools.{role}.image",
        "command": flags,
        "args": flags,
        "ports": "remove it",
        "startupProbe": "remove it",
        "readinessProbe": "remove it",
        "livenessProbe": "remove it",
    }


def _check_own_container(container: Mapping[str, Any], role: Role | None, path: str) -> None:
    for name, fix in _owned_in_container(role).items():
        if name in container:
            raise SpecError(f"{path}.{name}", f"is set by the operator: {fix}")
    if role is None:
        _check_devices(container, path)
    elif set(_object(container, "resources", path)) - {"claims"}:
        fix = "gateway.resources" if role is Role.GATEWAY else "resources of a variant"
        raise SpecError(f"{path}.resources", f"may only name claims: set {fix} for the others")
    for variable in container.get("env") or ():
        name = variable["name"]
        if name in OWNED_ENV or name.startswith(OWNED_ENV_PREFIX):
            raise SpecError(f"{path}.env[{name}]", "is set by the operator: remove it")
    for mount in container.get("volumeMounts") or ():
        where = mount["mountPath"].rstrip("/") or "/"
        if IDENTITY_PATH.startswith(f"{where.rstrip('/')}/"):
            raise SpecError(
                f"{path}.volumeMounts[{where}]",
                f"hides {IDENTITY_PATH}, which is the operator's: choose another path",
            )
        if any(where == own or where.startswith(f"{own}/") for own in OWNED_MOUNTS):
            raise SpecError(
                f"{path}.volumeMounts[{where}]",
                f"{', '.join(OWNED_MOUNTS)} are the operator's: choose another path",
            )


def _check_devices(container: Mapping[str, Any], path: str) -> None:
    """Refuse accelerators of other containers: budgets count those of the worker only."""
    resources = _object(container, "resources", path)
    for side in ("requests", "limits"):
        for name in _object(resources, side, f"{path}.resources"):
            if is_accelerator(name):
                raise SpecError(
                    f"{path}.resources.{side}[{name}]",
                    "only the worker may have devices: set resources of a variant",
                )


def _object(parent: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = parent.get(name)
    if value is not None and not isinstance(value, dict):
        raise SpecError(f"{path}.{name}", "must be an object")
    return value or {}


def _check_shape(spec: Mapping[str, Any], path: str) -> None:
    """Refuse directives of a patch, and items of merged lists that lack their key."""
    for where, name, value in _fields(spec, path):
        if name.startswith("$"):
            raise SpecError(where, "directives of a patch are not supported: remove it")
        key = LIST_KEYS.get(name)
        if key is None or not isinstance(value, list):
            if key is not None and value is not None:
                raise SpecError(where, "must be a list")
            continue
        seen = set()
        for index, item in enumerate(value):
            kind = int if key == "containerPort" else str
            if not isinstance(item, dict) or not isinstance(item.get(key), kind) or not item[key]:
                raise SpecError(f"{where}[{index}]", f"must be an object with {key}")
            if item[key] in seen:
                raise SpecError(f"{where}[{index}]", f"two items have the {key} {item[key]}")
            seen.add(item[key])


def _fields(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of every field at every depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{path}.{name}", name, item
            yield from _fields(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _fields(item, f"{path}[{index}]")


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("initContainers", "containers"):
        for item in spec.get(kind) or ():
            yield kind, item
