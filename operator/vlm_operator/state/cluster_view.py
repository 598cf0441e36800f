"""The state that the API server returns: pods, node classes, the objects of a service."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import Manifest, epoch_seconds
from vlm_operator.names import Role
from vlm_operator.state.deployments import DeploymentState
from vlm_operator.state.pod_stats import Sample

_QUIET_LINE = re.compile(r"\b(INFO|DEBUG|WARNING|WARN|TRACE)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ContainerState:
    """The state of a container, and its last termination.

    Attributes:
        started: its image is present and its process ran at least once.
        waiting: kubelet's reason why it does not run; "" if it runs.
        waiting_message: kubelet's message for `waiting`.
        exit_code: exit code of the last termination; None if it never terminated.
        exit_reason: kubelet's reason of the last termination: `Error`, `OOMKilled`.
        exit_message: the last part of its output, as kubelet stores it.
        lived_seconds: run time of the last process that terminated; None if unknown.
    """

    ready: bool = False
    started: bool = False
    restarts: int = 0
    waiting: str = ""
    waiting_message: str = ""
    exit_code: int | None = None
    exit_reason: str = ""
    exit_message: str = ""
    lived_seconds: float | None = None

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> ContainerState:
        """Read one item of `status.containerStatuses`."""
        state = status.get("state", {})
        waiting, ended = state.get("waiting") or {}, state.get("terminated")
        last = status.get("lastState", {}).get("terminated") or ended
        return cls(
            ready=bool(status.get("ready")),
            started=bool(state.get("running") or last),
            restarts=int(status.get("restartCount", 0)),
            waiting=str(waiting.get("reason", "")),
            waiting_message=str(waiting.get("message", "")),
            exit_code=None if last is None else int(last.get("exitCode", 0)),
            exit_reason="" if last is None else str(last.get("reason", "")),
            exit_message="" if last is None else str(last.get("message", "")),
            lived_seconds=None if last is None else _lived(last),
        )


@dataclasses.dataclass(frozen=True)
class PodState:
    """One pod as the API server returns it. Times are seconds since the epoch.

    Attributes:
        accepting: value of the readiness gate; None until it is set.
        gate_since: time of the gate's last transition.
        finished: the pod's phase is Succeeded or Failed.
        restarts: restarts of all containers, init containers excluded.
        blocked: the cause that keeps the pod from becoming ready; "" if none is known.
        ready_since: time of the last transition to ready; None if it is not ready.
        unready_since: time of the last transition to not ready; None if it is ready or has no such
            condition.
        containers: init containers first.
        unscheduled: the scheduler's message while the pod has no node; "" otherwise.
        claims: names of the claims that it mounts.
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
    claims: frozenset[str] = frozenset()

    @property
    def waiting_since(self) -> float:
        """Time of the last change: it was created, got its node, or stopped being ready."""
        return max(self.created, self.scheduled_since or 0.0, self.unready_since or 0.0)

    @property
    def lost_its_node(self) -> bool:
        """Whether the node controller, not kubelet, set Ready to False.

        Kubelet sets Ready to True if all containers are ready and the gate is True. If both still
        hold and Ready turned False after the gate turned True, kubelet did not set it.
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
        """Whether its gate is closed or it is being deleted: it accepts no new work."""
        return self.deleting or self.accepting is False

    @property
    def accepting_since(self) -> float | None:
        """Time at which it began to accept work; None if it is not ready.

        Readiness may flap and a drain may be cancelled, so the earlier of both transitions counts.
        """
        began = [at for at in (self.ready_since, self.gate_since) if at is not None]
        return min(began) if self.ready and began else None

    @property
    def served(self) -> bool:
        """Whether its containers were ever ready; the operator sets the gate only then."""
        return self.ready or self.containers_ready or self.accepting is not None

    @property
    def starting(self) -> bool:
        return self.scheduled and not self.ready and not self.draining and not self.finished

    @property
    def pending(self) -> bool:
        return not self.scheduled and not self.draining and not self.finished


@dataclasses.dataclass(frozen=True)
class DownloadProgress:
    """How far a download is, as its pod reports it.

    Attributes:
        num_bytes: bytes that are downloaded, or checked if `checking`.
        total_bytes: bytes of the model; 0 while its files are listed.
        checking: whether the files are complete and their hashes are compared.
        seconds_left: time until all is downloaded; None if it is unknown.
    """

    num_bytes: int
    total_bytes: int
    checking: bool = False
    seconds_left: float | None = None


@dataclasses.dataclass(frozen=True)
class DownloadPod:
    """One pod of a Job that downloads a model.

    Attributes:
        job: name of the Job.
        created: seconds since the epoch.
        finished: the pod's phase is Succeeded or Failed.
        blocked: the cause that keeps it from running, or of its failure; "" if none is known.
        error: the last error of its output, with the fix after "; "; "" if it has none.
        started: its image is present and its process ran at least once.
        unscheduled: the scheduler's message while the pod has no node; "" otherwise.
        progress: the pod's own report; None if it gave none.
    """

    name: str
    uid: str
    job: str
    created: float
    ip: str | None = None
    scheduled: bool = False
    started: bool = False
    deleting: bool = False
    finished: bool = False
    failed: bool = False
    blocked: str = ""
    error: str = ""
    unscheduled: str = ""
    progress: DownloadProgress | None = None


@dataclasses.dataclass(frozen=True)
class NodeClassState:
    """The fields of a VLMNodeClass that decisions need.

    Attributes:
        accelerator: resource name of its devices; None without devices.
        accelerators: devices of one pod.
        cost_per_hour: cost of one replica, the spot price on spot nodes; None if unknown.
        speed: work per second by role, relative to other classes; a role without an entry has 1.0.
        roles: roles that may run on these nodes; empty for all.
        startup_seconds: time from a pod's creation to ready: the measured 90th percentile, else
            the expected value.
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
    """The state that one turn of the loop reads.

    Attributes:
        service: the VLMService; None if it does not exist.
        children: objects that the service controls, by kind and name.
        samples: /stats samples by pod uid.
        now: seconds since the epoch at which the read began.
        foreign: objects, pods included, that carry the service's label but belong to another owner,
            by kind and name. Decisions ignore them.
        downloads: pods of the service's Jobs.
    """

    service: Manifest | None
    children: Mapping[tuple[str, str], Manifest]
    pods: tuple[PodState, ...]
    node_classes: Mapping[str, NodeClassState]
    samples: Mapping[str, Sample]
    now: float
    foreign: Mapping[tuple[str, str], Manifest] = dataclasses.field(default_factory=dict)
    downloads: tuple[DownloadPod, ...] = ()

    def of(self, role: Role) -> tuple[PodState, ...]:
        """Return all pods of a role that have not ended, oldest first."""
        pods = [pod for pod in self.pods if pod.role is role and not pod.finished]
        return tuple(sorted(pods, key=lambda pod: (pod.created, pod.name)))

    def of_deployment(self, item: DeploymentState) -> list[PodState]:
        """Return the pods of one Deployment that have not ended, oldest first."""
        return [
            pod for pod in self.of(item.role) if (pod.role, pod.variant, pod.revision) == item.key
        ]

    def child(self, kind: str, name: str) -> Manifest | None:
        return self.children.get((kind, name))

    def with_children(self, newer: Mapping[tuple[str, str], Manifest]) -> Observed:
        """Return a copy in which these children replace those of the same kind and name."""
        return dataclasses.replace(self, children={**self.children, **newer})

    def of_kind(self, kind: str) -> Iterator[Manifest]:
        """Yield all children of a kind, ordered by name."""
        for key in sorted(self.children):
            if key[0] == kind:
                yield self.children[key]

    def deployments(self) -> tuple[DeploymentState, ...]:
        read = (DeploymentState.of(manifest) for manifest in self.of_kind("Deployment"))
        return tuple(item for item in read if item is not None)

    def impostors(self) -> frozenset[tuple[str, str]]:
        """Return kind and name of foreign Deployments and pods whose labels claim a role."""
        return frozenset(
            key
            for key, item in self.foreign.items()
            if key[0] in ("Deployment", "Pod")
            and item["metadata"].get("labels", {}).get(names.LABEL_ROLE) in tuple(Role)
        )

    def pool_replicas(self, service: str, role: Role) -> int | None:
        """Return `spec.replicas` of the role's VLMPool; None if it does not exist."""
        pool = self.child(names.KIND_POOL, names.child(service, role))
        return None if pool is None else int(pool["spec"]["replicas"])


def error_line(output: str, *, last_only: bool = False) -> str:
    """Return the last line of a process's output that reports an error; "" if there is none.

    A process that a signal ended logs no reason, so for it only the last line counts.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    for line in lines[-1:] if last_only else reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            if str(entry.get("level", "")).upper() in ("ERROR", "CRITICAL", "FATAL"):
                texts = [str(entry.get(key, "")) for key in ("message", "error")]
                return one_line(": ".join(filter(None, texts)))
        elif not _QUIET_LINE.search(line):
            return one_line(line)
    return ""


def one_line(text: str, *, limit: int = 300) -> str:
    """Return a text as one line of a condition's message; `; ` is reserved for fixes there."""
    flat = " ".join(text.split()).rstrip(": ").replace("; ", ", ")
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _lived(ended: Mapping[str, Any]) -> float | None:
    began, end = ended.get("startedAt"), ended.get("finishedAt")
    return epoch_seconds(end) - epoch_seconds(began) if began and end else None
