"""What the checks look at, and what they answer: values, so that a check asks nobody."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vlm_operator import names
from vlm_operator.cluster import Kind, Manifest


class Level(enum.StrEnum):
    """How bad it is; a run with a `fail` in it ends with status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: which check, what it saw, and what to do, "" where there is nothing to do."""

    check: str
    level: Level
    message: str
    remedy: str = ""


class Right(NamedTuple):
    """One thing that somebody may do. `resource` is `pods` or `pods/status`."""

    verb: str
    group: str
    resource: str
    name: str = ""

    @property
    def text(self) -> str:
        """As a person says it: patch vlmservices/status."""
        return f"{self.verb} {self.resource}" + (f" {self.name}" if self.name else "")


@dataclasses.dataclass(frozen=True)
class Installation:
    """One operator, as its Deployment describes it.

    Attributes:
        account: the name of its ServiceAccount.
        watched: the namespaces that it looks after; empty is all.
        deployment: None where there is none, as for an operator outside of the cluster.
    """

    namespace: str = names.OPERATOR_NAMESPACE
    account: str = names.OPERATOR_LEASE
    lease: str = names.OPERATOR_LEASE
    watched: tuple[str, ...] = ()
    deployment: Manifest | None = None

    @property
    def name(self) -> str:
        """Namespace and name of the Deployment, or of the Lease where there is no Deployment."""
        found = self.deployment
        return f"{self.namespace}/{found['metadata']['name'] if found else self.lease}"

    def watches(self, namespace: str) -> bool:
        """Whether it looks after a namespace."""
        return not self.watched or namespace in self.watched

    @classmethod
    def of(cls, deployment: Manifest) -> Installation:
        """Read the Deployment that the chart makes."""
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
    """A cluster, as one user sees it at one time.

    Attributes:
        now: seconds since the epoch, on the clock of this machine.
        version: of the API server, `v1.34.2`.
        objects: what could be read, by kind.
        unread: what could not, and why.
        mine: what the user may do.
        operators: what each installation may do, in each of its namespaces ("" is all); a missing
            one could not be asked for, and `unasked` says why.
        gateway: how the metrics of a gateway came, None where nobody asked for them.
    """

    now: float
    version: str
    objects: Mapping[Kind, Sequence[Manifest]] = dataclasses.field(default_factory=dict)
    unread: Mapping[Kind, str] = dataclasses.field(default_factory=dict)
    mine: Mapping[Right, bool] = dataclasses.field(default_factory=dict)
    operators: Mapping[tuple[str, str], Mapping[Right, bool]] = dataclasses.field(
        default_factory=dict
    )
    unasked: str = ""
    gateway: Finding | None = None

    def all(self, kind: Kind) -> Sequence[Manifest]:
        """Every object of a kind that could be read."""
        return self.objects.get(kind, ())

    def one(self, kind: Kind, name: str, namespace: str = "") -> Manifest | None:
        """One of them, None where there is none."""
        for item in self.all(kind):
            meta = item["metadata"]
            if (meta.get("namespace", ""), meta["name"]) == (namespace, name):
                return item
        return None
