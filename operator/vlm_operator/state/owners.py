"""Decides which objects belong to a service, by their controller reference. Pure.

VLMService ◀─ controller, by uid ─ child
Deployment ◀─ controller, by name ─ ReplicaSet DEPLOYMENT-HASH ◀─ controller ─ Pod

VLMService ◀─ controller, by uid ─ Job ◀─ controller, by name ─ Pod

Any user can set a label, so labels prove no ownership. A pod names its ReplicaSet. The name of a
ReplicaSet is that of its Deployment plus the pod's `pod-template-hash`. Garbage collection deletes
a pod if no owner has that name and uid. So the name suffices, and the operator watches no
ReplicaSets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from vlm_operator import names
from vlm_operator.cluster import Manifest

Key = tuple[str, str]  # kind and name
_HASH = "pod-template-hash"


def controller(item: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ownerReference of an object's controller; None if it has none."""
    for owner in item["metadata"].get("ownerReferences", []):
        if owner.get("controller"):
            return cast("Mapping[str, Any]", owner)
    return None


def owned_by(item: Mapping[str, Any], uid: str | None) -> bool:
    """Whether the object with `uid` controls this one."""
    owner = controller(item)
    return owner is not None and uid is not None and owner.get("uid") == uid


def is_pod_of(
    pod: Mapping[str, Any], service: str, *, ours: Collection[str], foreign: Collection[str]
) -> bool:
    """Whether a pod belongs to a Deployment of a service.

    Pods of a Deployment that was just deleted still belong to the service, because they finish
    their requests. The expected names of its Deployments identify them.

    `ours` are the names of Deployments that the service controls, `foreign` those of Deployments
    that carry its labels and that it does not control.
    """
    owner, meta = controller(pod), pod["metadata"]
    suffix = f"-{meta.get('labels', {}).get(_HASH, '')}"
    if owner is None or owner.get("kind") != "ReplicaSet" or suffix == "-":
        return False
    replica_set = str(owner.get("name", ""))
    if not replica_set.endswith(suffix):
        return False
    deployment = replica_set.removesuffix(suffix)
    if deployment in ours:
        return True
    return deployment not in foreign and deployment in _deployment_names(service, meta["labels"])


def is_download_of(pod: Mapping[str, Any], service: str, *, foreign: Collection[str]) -> bool:
    """Whether a pod belongs to a Job that downloads a model for a service.

    Pods of a Job that was just deleted still belong to it. `foreign` are the names of Jobs that
    carry the service's labels and that it does not control.
    """
    owner, labels = controller(pod), pod["metadata"].get("labels", {})
    if owner is None or owner.get("kind") != "Job" or owner.get("name") in foreign:
        return False
    return owner.get("name") == names.model_claim(service, labels.get(names.LABEL_MODEL, ""))


def parted(
    items: Iterable[Manifest], ours: Callable[[Manifest], bool]
) -> tuple[dict[Key, Manifest], dict[Key, Manifest]]:
    """Split objects into those for which `ours` is true and the others, each by kind and name."""
    owned: dict[Key, Manifest] = {}
    others: dict[Key, Manifest] = {}
    for item in items:
        (owned if ours(item) else others)[item["kind"], item["metadata"]["name"]] = item
    return owned, others


def names_of(kind: str, items: Iterable[Key]) -> frozenset[str]:
    return frozenset(name for item_kind, name in items if item_kind == kind)


def _deployment_names(service: str, labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the Deployment of a pod with these labels, in this and older versions."""
    role = labels.get(names.LABEL_ROLE, "")
    variant = labels.get(names.LABEL_VARIANT, "")
    revision = labels.get(names.LABEL_REVISION, "")
    if role == names.Role.GATEWAY:
        yield names.child(service, role)
        yield names.gateway(service, labels.get(names.LABEL_COMPAT, ""))
    else:
        yield names.deployment(service, role, variant, revision)
        yield names.former_deployment(service, role, variant, revision)
