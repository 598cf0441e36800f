"""The Kubernetes API, as narrow as the operator needs it: dicts in, dicts out, typed errors.

`kube.KubeCluster` speaks to a real one, `testing.FakeCluster` is one in memory, `leader.Fenced`
refuses writes of a process that no longer leads, `informer.Informed` lists from memory. Every
method raises `ClusterError` or one of its subclasses, and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from vlm_operator import names

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One resource of the API: what its manifests say, and where its URL is.

    Attributes:
        api_version: `apps/v1`, `v1`.
        kind: `Deployment`.
        plural: `deployments`, the URL's last word.
        namespaced: whether objects live in a namespace.
    """

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """`apps`; empty for the core group."""
        return self.api_version.rpartition("/")[0]


SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SERVICE = Kind("v1", "Service", "services")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
PDB = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")  # Kubernetes' own, between both
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
REVIEW = Kind(
    "authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", namespaced=False
)
SELF_REVIEW = Kind(
    "authorization.k8s.io/v1",
    "SelfSubjectAccessReview",
    "selfsubjectaccessreviews",
    namespaced=False,
)
VLM_SERVICE = Kind(names.API_VERSION, names.KIND_SERVICE, names.PLURAL_SERVICE)
VLM_POOL = Kind(names.API_VERSION, names.KIND_POOL, names.PLURAL_POOL)
VLM_NODE_CLASS = Kind(
    names.API_VERSION, names.KIND_NODE_CLASS, names.PLURAL_NODE_CLASS, namespaced=False
)

# What a VLMService owns, in the order in which it is applied: a pod finds its account, its binding
# and its configuration when it starts.
CHILD_KINDS = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    CONFIG_MAP,
    NETWORK_POLICY,
    SERVICE,
    PDB,
    VLM_POOL,
    DEPLOYMENT,
)

KINDS = {
    (kind.api_version, kind.kind): kind
    for kind in (
        *CHILD_KINDS,
        REPLICA_SET,
        POD,
        EVENT,
        NODE,
        LEASE,
        REVIEW,
        SELF_REVIEW,
        VLM_SERVICE,
        VLM_NODE_CLASS,
    )
}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """Return the kind that a manifest declares; it is one of `KINDS`."""
    return KINDS[manifest["apiVersion"], manifest["kind"]]


class Cluster(Protocol):
    """What the operator asks of a cluster."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """Read one object; None where there is none."""
        ...

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """Read all objects of a kind, in one namespace or in all, that carry `labels`."""
        ...

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """Server-side apply as `manager`, taking over the fields it names; returns the object.

        A `metadata.uid` in the manifest is a precondition: `ConflictError` where another object
        took the name.
        """
        ...

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """Merge-patch an object that exists: maps are merged, lists replaced as a whole.

        Server-side apply leaves items that others added to a keyed list; this takes them out.
        """
        ...

    async def create(self, manifest: Manifest) -> Manifest:
        """Create; `ConflictError` where the name is taken."""
        ...

    async def replace(self, manifest: Manifest) -> Manifest:
        """Replace the version in `metadata.resourceVersion`; `ConflictError` if it moved on."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """Delete in the background, only the one with `uid` if given; an absent one is fine."""
        ...


class Happening(enum.Enum):
    """What an event of a watch says, in Kubernetes' words."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"  # nothing happened up to the item's version; it is no object


@dataclasses.dataclass(frozen=True)
class WatchEvent:
    """One event, with the object as it was then."""

    happening: Happening
    item: Manifest


@dataclasses.dataclass(frozen=True)
class Page:
    """A part of a list, all parts as things were at `version`."""

    items: Sequence[Manifest]
    version: int


class Source(Protocol):
    """Where an informer's lists and watches come from.

    `labelled` is a label that objects carry, whatever its value; "" is all objects.
    """

    def pages(
        self, kind: Kind, namespace: str | None, *, labelled: str
    ) -> AsyncGenerator[Page, None]:
        """List everything, part by part."""
        ...

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labelled: str,
        since: int,
        seconds: float,
        silence: float,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield what happens after version `since`, for `seconds`.

        Raises:
            ClusterError: it broke, or said nothing for `silence` seconds.
        """
        ...
