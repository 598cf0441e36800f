"""The interface to the Kubernetes API that the operator uses: dicts and typed errors.

`kube.KubeCluster` is the real client. The tests' `FakeCluster` is an API server in memory.
`leader.Fenced` refuses writes of a process that no longer leads. `informer.CachedClient` serves
lists from a cache. Methods raise only `ClusterError` and its subclasses.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from vlm_operator import names

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A resource of the Kubernetes API, such as `Kind("apps/v1", "Deployment", "deployments")`."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group, for example `apps`; empty for the core group."""
        return self.api_version.rpartition("/")[0]


SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")  # written and never read in watched namespaces
SERVICE = Kind("v1", "Service", "services")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
PDB = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
JOB = Kind("batch/v1", "Job", "jobs")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")  # created by Deployments, not by us
CERTIFICATE = Kind("cert-manager.io/v1", "Certificate", "certificates")
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

# The kinds that a VLMService owns, in the order of application: when a pod starts, its
# ServiceAccount, RoleBinding and ConfigMap exist.
CHILD_KINDS = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    CONFIG_MAP,
    NETWORK_POLICY,
    CLAIM,
    JOB,
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
        SECRET,
        CERTIFICATE,
        LEASE,
        REVIEW,
        SELF_REVIEW,
        VLM_SERVICE,
        VLM_NODE_CLASS,
    )
}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """Return the kind of a manifest.

    Raises:
        KeyError: it is not one of `KINDS`.
    """
    return KINDS[manifest["apiVersion"], manifest["kind"]]


def timestamp(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch_seconds(moment: str) -> float:
    """Return a Kubernetes timestamp as seconds since the epoch."""
    return datetime.datetime.fromisoformat(moment).timestamp()


class Cluster(Protocol):
    """The calls to a cluster that the operator makes."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """Read one object; None if it does not exist."""
        ...

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """Read all objects of a kind with `labels`, in one namespace or in all."""
        ...

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """Server-side apply as field manager `manager`, with force; return the object.

        Raises:
            ConflictError: the manifest has a `metadata.uid`, and the object has another one.
        """
        ...

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """Merge-patch an existing object: maps are merged, lists are replaced.

        It removes items that other managers added to a keyed list; server-side apply keeps them.
        """
        ...

    async def metadata_if(
        self, kind: Kind, namespace: str, name: str, expected: Mapping[str, str]
    ) -> Manifest | None:
        """Compare fields of an object by a JSON patch of tests, which changes nothing.

        It needs the permission `patch`, not `get`. The answer has no data.

        Args:
            kind: kind of the object.
            namespace: its namespace.
            name: its name.
            expected: values by JSON pointer, such as `/metadata/resourceVersion`.

        Returns:
            The object's metadata if all values are equal; None if it does not exist.

        Raises:
            DiffersError: a value differs.
        """
        ...

    async def create(self, manifest: Manifest) -> Manifest:
        """Create an object; `ConflictError` if the name exists."""
        ...

    async def replace(self, manifest: Manifest) -> Manifest:
        """Replace an object; `ConflictError` if its `metadata.resourceVersion` has changed."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """Delete an object with background propagation; if it does not exist, do nothing.

        With `uid`, only the object with that uid is deleted.
        """
        ...


class WatchEventType(enum.Enum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"  # carries only a resourceVersion; all earlier events were sent


@dataclasses.dataclass(frozen=True)
class WatchEvent:
    type: WatchEventType
    item: Manifest


@dataclasses.dataclass(frozen=True)
class Page:
    items: Sequence[Manifest]
    version: int  # resourceVersion of the list; equal for all of its pages


class Source(Protocol):
    """The source of an informer's lists and watches.

    `labelled` is the key of a label that objects must have, with any value; "" selects all.
    """

    def pages(
        self, kind: Kind, namespace: str | None, *, labelled: str
    ) -> AsyncGenerator[Page, None]:
        """List all objects, page by page."""
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
        """Yield the events after resourceVersion `since`, for `seconds`.

        Raises:
            ClusterError: the watch failed, or had neither event nor bookmark for `silence` seconds.
        """
        ...
