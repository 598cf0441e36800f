"""The input and the output of the checks, as values, and the kinds that the checks read."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vlm_operator import names
from vlm_operator.cluster import (
    NETWORK_POLICY,
    NODE,
    POD,
    ROLE,
    VLM_NODE_CLASS,
    VLM_POOL,
    VLM_SERVICE,
    Kind,
    Manifest,
)

CRD = Kind(
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")

ENDPOINT_SLICE = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")

# Kinds read in the whole cluster, and kinds read in the chosen namespaces.
GLOBAL = (CRD, NAMESPACE, NODE, VLM_NODE_CLASS)
LOCAL = (VLM_SERVICE, VLM_POOL, POD, ROLE, NETWORK_POLICY, CLAIM, AUTOSCALER)


class Level(enum.StrEnum):
    """Severity of a finding; if any is `fail`, the command ends with status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of output: the check, its result, and the remedy ("" if none is needed)."""

    check: str
    level: Level
    message: str
    remedy: str = ""


class Right(NamedTuple):
    """One RBAC permission. `resource` is such as `pods` or `pods/status`."""

    verb: str
    group: str
    resource: str
    name: str = ""

    @property
    def text(self) -> str:
        """Such as `patch vlmservices/status`."""
        return f"{self.verb} {self.resource}" + (f" {self.name}" if self.name else "")


@dataclasses.dataclass(frozen=True)
class Installation:
    """One operator, as its Deployment describes it.

    Attributes:
        namespace: namespace of its Lease.
        account: name of its ServiceAccount.
        watched: namespaces that it watches; empty means all.
        deployment: None if there is none, such as for an operator outside of the cluster.
    """

    namespace: str = names.OPERATOR_NAMESPACE
    account: str = names.OPERATOR_LEASE
    lease: str = names.OPERATOR_LEASE
    watched: tuple[str, ...] = ()
    deployment: Manifest | None = None

    @property
    def name(self) -> str:
        """Namespace and name of the Deployment, or of the Lease if there is no Deployment."""
        found = self.deployment
        return f"{self.namespace}/{found['metadata']['name'] if found else self.lease}"

    def watches(self, namespace: str) -> bool:
        return not self.watched or namespace in self.watched

    @classmethod
    def of(cls, deployment: Manifest) -> Installation:
        """Read the Deployment that the Helm chart creates."""
        pod = deployment["spec"]["template"]["spec"]
        arguments = [str(item) for box in pod["containers"] for item in box.get("args", [])]
        flags = [item.partition("=") for item in arguments]
        namespace = deployment["metadata"]["namespace"]
        lease_namespace = [value for flag, _, value in flags if flag == "--lease-namespace"]
        lease = [value for flag, _, value in flags if flag == "--lease-name"]
        return cls(
            namespace=(lease_namespace or [namespace])[-1],
            account=pod.get("serviceAccountName", "default"),
            lease=(lease or [names.OPERATOR_LEASE])[-1],
            watched=tuple(value for flag, _, value in flags if flag == "--namespace"),
            deployment=deployment,
        )


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one user can read of a cluster at one time.

    Attributes:
        now: seconds since the epoch, on the clock of this machine.
        version: version of the API server, such as `v1.34.2`.
        unreadable: reason for each kind that could not be read.
        operators: permissions by name of the installation and namespace ("" means all). Empty if
            the review failed.
        review_problem: why the operators' permissions are unknown; "" if they are known.
        gateway: result of fetching a gateway's metrics; None without --probe.
    """

    now: float
    version: str
    objects: Mapping[Kind, Sequence[Manifest]] = dataclasses.field(default_factory=dict)
    unreadable: Mapping[Kind, str] = dataclasses.field(default_factory=dict)
    user_rights: Mapping[Right, bool] = dataclasses.field(default_factory=dict)
    operators: Mapping[tuple[str, str], Mapping[Right, bool]] = dataclasses.field(
        default_factory=dict
    )
    review_problem: str = ""
    gateway: Finding | None = None

    def all(self, kind: Kind) -> Sequence[Manifest]:
        return self.objects.get(kind, ())

    def one(self, kind: Kind, name: str, namespace: str = "") -> Manifest | None:
        """Return one object of a kind; None if it does not exist or could not be read."""
        for item in self.all(kind):
            meta = item["metadata"]
            if (meta.get("namespace", ""), meta["name"]) == (namespace, name):
                return item
        return None
