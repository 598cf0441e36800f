"""What the API server shows: pods, node classes, and everything that a service owns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.names import Role
from vlm_operator.state.containers import ContainerState
from vlm_operator.state.deployments import DeploymentState, Manifest
from vlm_operator.state.reports import Sample


@dataclasses.dataclass(frozen=True)
class PodState:
    """One pod as the API server shows it.

    Attributes:
        accepting: the readiness gate; None until it was set.
        gate_since: when the gate last changed, seconds since the epoch.
        ready_since: when it last became ready; None while it is not.
        scheduled_since: when it got its node; None while it has none.
        unready_since: when it last ceased to be; None while it is ready, or never said.
        blocked: the one thing that keeps it from being ready, "" when nothing is known to.
        created: seconds since the epoch.
        containers: init containers first.
        unscheduled: the scheduler's own words while the pod has no node.
        mount_failure: what kubelet last said of a volume that it cannot mount; "" where nothing.
    """

    name: str
    uid: str
    role: Role
    variant: str
    revision: str
    node: str | None
    ip: str | None
    created: float
    scheduled: bool
    containers_ready: bool
    ready: bool
    accepting: bool | None
    gate_since: float | None
    deleting: bool
    finished: bool
    restarts: int
    deletion_cost: int
    blocked: str
    ready_since: float | None = None
    unready_since: float | None = None
    compat: str = ""
    scheduled_since: float | None = None
    containers: tuple[ContainerState, ...] = ()
    unscheduled: str = ""
    mount_failure: str = ""

    @property
    def waiting_since(self) -> float:
        """Since when it has been as it is: it came, got its node, or ceased to be ready."""
        return max(self.created, self.scheduled_since or 0.0, self.unready_since or 0.0)

    @property
    def lost_its_node(self) -> bool:
        """The node's controller took readiness from a pod that kubelet had last seen well.

        Kubelet sets Ready once all containers are ready and the gate is open. If both still hold
        and Ready turned after the gate did, kubelet did not do it.
        """
        turned, opened = self.unready_since, self.gate_since
        return (
            self.containers_ready
            and self.accepting is True
            and not self.ready
            and turned is not None
            and opened is not None
            and turned > opened
        )

    @property
    def draining(self) -> bool:
        """Told to take no new work, or on its way out."""
        return self.deleting or self.accepting is False

    @property
    def taking_since(self) -> float | None:
        """When it began to take work; None while it does not.

        Readiness may flap and a drain may be called off: the earlier of the two is the start.
        """
        began = [at for at in (self.ready_since, self.gate_since) if at is not None]
        return min(began) if self.ready and began else None

    @property
    def served(self) -> bool:
        """Whether its containers were ever ready: only then is its gate written."""
        return self.ready or self.containers_ready or self.accepting is not None

    @property
    def starting(self) -> bool:
        """On a node, and not ready yet."""
        return self.scheduled and not self.ready and not self.draining and not self.finished

    @property
    def pending(self) -> bool:
        """On no node yet."""
        return not self.scheduled and not self.draining and not self.finished


@dataclasses.dataclass(frozen=True)
class NodeClassState:
    """What a VLMNodeClass says that decisions need.

    Attributes:
        accelerator: resource name of its devices, None where it has none.
        accelerators: devices of one pod.
        cost_per_hour: of one replica, the spot price on spot nodes; None where nobody said.
        speed: work per second of each role relative to other classes, 1.0 where nobody said.
        roles: that may run here; empty is all.
        startup_seconds: from creation to ready, measured (90th percentile) or else expected.
    """

    name: str
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    accelerator: str | None = None
    accelerators: int = 0
    cost_per_hour: float | None = None
    spot: bool = False
    speed: Mapping[Role, float] = dataclasses.field(default_factory=dict)
    roles: frozenset[Role] = frozenset()
    startup_seconds: float = 180.0


@dataclasses.dataclass(frozen=True)
class Observed:
    """Everything that one turn of the loop looks at.

    Attributes:
        service: the VLMService, None where it is gone.
        children: what the service controls, by kind and name.
        now: seconds since the epoch, when the reading began.
        foreign: what carries the service's label and is not its own, by kind and name, pods
            included. Decisions ignore it.
    """

    service: Manifest | None
    children: Mapping[tuple[str, str], Manifest]
    pods: tuple[PodState, ...]
    node_classes: Mapping[str, NodeClassState]
    samples: Mapping[str, Sample]  # by pod uid
    now: float
    foreign: Mapping[tuple[str, str], Manifest] = dataclasses.field(default_factory=dict)

    def of(self, role: Role) -> tuple[PodState, ...]:
        """All pods of a role that have not ended, oldest first."""
        found = [pod for pod in self.pods if pod.role is role and not pod.finished]
        return tuple(sorted(found, key=lambda pod: (pod.created, pod.name)))

    def child(self, kind: str, name: str) -> Manifest | None:
        """One child, None where it does not exist."""
        return self.children.get((kind, name))

    def with_children(self, newer: Mapping[tuple[str, str], Manifest]) -> Observed:
        """The same with these children in the place of those of their kind and name."""
        return dataclasses.replace(self, children={**self.children, **newer})

    def of_kind(self, kind: str) -> Iterator[Manifest]:
        """All children of a kind, by name."""
        for (found, _), manifest in sorted(self.children.items(), key=lambda item: item[0]):
            if found == kind:
                yield manifest

    def deployments(self) -> tuple[DeploymentState, ...]:
        """All Deployments of the service's roles, gateway included."""
        read = (DeploymentState.of(manifest) for manifest in self.of_kind("Deployment"))
        return tuple(item for item in read if item is not None)

    def impostors(self) -> frozenset[tuple[str, str]]:
        """Foreign Deployments and pods that say that they have a role in the service."""
        return frozenset(
            key
            for key, item in self.foreign.items()
            if key[0] in ("Deployment", "Pod")
            and item["metadata"].get("labels", {}).get(names.LABEL_ROLE) in tuple(Role)
        )

    def pool_replicas(self, service: str, role: Role) -> int | None:
        """`spec.replicas` of the role's VLMPool, None where there is none."""
        pool = self.child(names.KIND_POOL, names.child(service, role))
        return None if pool is None else int(pool["spec"]["replicas"])
