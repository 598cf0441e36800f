"""What was seen: pods, their own reports, the objects a service owns.

Values only; `observe` and `scrape` fill them.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from vlm_operator import names
from vlm_operator.names import Role

Manifest = dict[str, Any]
Phase = Literal["loading", "ready", "draining", "failed"]


@dataclasses.dataclass(frozen=True)
class KvTokens:
    """A worker's KV cache, in tokens."""

    capacity: int
    running: int
    reserved: int
    cached: int
    free: int
    queued: int


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a worker found in the checkpoint; integers, 0 where a role does not know."""

    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    image_tokens_per_megapixel: int
    weights_bytes: int


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage, summed over requests that met and that missed their target.

    Attributes:
        buckets: upper bound in seconds → requests whose stage took that long or less.
    """

    met: float
    missed: float
    buckets: Mapping[float, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Busy:
    """What a worker has computed for one kind of work since it started. All of these only grow.

    encode    a call is one batch, an item one picture, a unit one patch, squares Σ patches²
    prefill   a call is one chunk, an item one prompt, a unit one token computed,
              squares Σ n·(h + n/2) for n tokens after h cached ones
    decode    a call is one step, an item one sequence of a step, a unit one KV token of a step
    """

    seconds: float
    calls: int
    items: int
    units: int
    squares: float


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Times between tokens at one gateway, counted since it started."""

    count: int
    buckets: Mapping[float, int]  # upper bound in seconds → gaps at or below it


@dataclasses.dataclass(frozen=True)
class Ttft:
    """Time to first token of one modality at one gateway, counted since it started."""

    count: int
    missed: int
    sum_seconds: float
    buckets: Mapping[float, int]  # upper bound in seconds → requests at or below it
    stages: Mapping[str, StageSeconds]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One pod's `/stats` (docs/stats.schema.json) at one moment; only well-formed ones exist."""

    pod_uid: str
    boot_id: str
    role: Role
    phase: Phase
    message: str
    accepting: bool
    inflight: int
    queued_requests: int
    queued_work_seconds: float
    admitted_work_seconds: float  # since the process started
    kv: KvTokens | None
    model: ModelFacts | None
    ttft: Mapping[str, Ttft]  # by modality; empty on workers
    config_hash: str | None
    busy: Mapping[str, Busy] = dataclasses.field(default_factory=dict)  # "encode", "prefill", …
    gaps: Gaps | None = None  # of gateways
    held_for: Mapping[str, int] = dataclasses.field(default_factory=dict)  # gateways: role → count


@dataclasses.dataclass(frozen=True)
class PodState:
    """One pod as the API server shows it.

    Attributes:
        accepting: the readiness gate; None until it was set.
        gate_since: when the gate last changed, seconds since the epoch.
        ready_since: when it last became ready; None while it is not.
        unready_since: when it last ceased to be; None while it is ready, or never said.
        blocked: the one thing that keeps it from being ready, "" when nothing is known to.
        created: seconds since the epoch.
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
        children: what carries the service's label, by kind and name, ours or not.
        now: seconds since the epoch, when the reading began.
    """

    service: Manifest | None
    children: Mapping[tuple[str, str], Manifest]
    pods: tuple[PodState, ...]
    node_classes: Mapping[str, NodeClassState]
    samples: Mapping[str, Sample]  # by pod uid
    now: float

    def of(self, role: Role) -> tuple[PodState, ...]:
        """All pods of a role that have not ended, oldest first."""
        found = [pod for pod in self.pods if pod.role is role and not pod.finished]
        return tuple(sorted(found, key=lambda pod: (pod.created, pod.name)))

    def child(self, kind: str, name: str) -> Manifest | None:
        """One child, None where it does not exist."""
        return self.children.get((kind, name))

    def of_kind(self, kind: str) -> Iterator[Manifest]:
        """All children of a kind, by name."""
        for (found, _), manifest in sorted(self.children.items(), key=lambda item: item[0]):
            if found == kind:
                yield manifest

    def deployments(self) -> tuple[DeploymentState, ...]:
        """All Deployments of the service's roles, gateway included."""
        return tuple(DeploymentState.of(manifest) for manifest in self.of_kind("Deployment"))

    def pool_replicas(self, service: str, role: Role) -> int | None:
        """`spec.replicas` of the role's VLMPool, None where there is none."""
        pool = self.child(names.KIND_POOL, names.child(service, role))
        return None if pool is None else int(pool["spec"]["replicas"])


@dataclasses.dataclass(frozen=True)
class DeploymentState:
    """One Deployment: one role, variant and revision.

    Attributes:
        available: pods that are ready, and have been for `minReadySeconds`.
        stages: what its workers load; empty where nobody said.
        initial: what it had when a rollout first took some of it; None before that.
        failed: why its revision is not tried again, "" where it is.
        created: seconds since the epoch.
    """

    name: str
    role: Role
    variant: str
    revision: str
    compat: str
    inputs: str
    resolved: str
    desired: int
    replicas: int
    ready: int
    deleting: bool
    available: int = 0
    stages: frozenset[str] = frozenset()
    initial: int | None = None
    failed: str = ""
    created: float = 0.0

    @classmethod
    def of(cls, manifest: Manifest) -> DeploymentState:
        """Read a manifest that carries the service's labels."""
        meta, status = manifest["metadata"], manifest.get("status", {})
        labels, notes = meta.get("labels", {}), meta.get("annotations", {})
        return cls(
            name=meta["name"],
            role=Role(labels[names.LABEL_ROLE]),
            variant=labels.get(names.LABEL_VARIANT, ""),
            revision=labels.get(names.LABEL_REVISION, ""),
            compat=labels.get(names.LABEL_COMPAT, ""),
            inputs=notes.get(ANNOTATION_INPUTS, ""),
            resolved=notes.get(ANNOTATION_RESOLVED, ""),
            desired=int(manifest["spec"].get("replicas", 1)),
            replicas=int(status.get("replicas", 0)),
            ready=int(status.get("readyReplicas", 0)),
            deleting=meta.get("deletionTimestamp") is not None,
            available=int(status.get("availableReplicas", 0)),
            stages=_stages(manifest),
            initial=int(noted)
            if (noted := notes.get(ANNOTATION_INITIAL, "")).isdecimal()
            else None,
            failed=notes.get(ANNOTATION_FAILED, ""),
            created=_seconds(meta.get("creationTimestamp")),
        )


def _stages(manifest: Manifest) -> frozenset[str]:
    """Read the stages off the command line of a worker."""
    pod = manifest["spec"].get("template", {}).get("spec", {})
    for container in pod.get("containers", []):
        for argument in container.get("args", []):
            if argument.startswith(STAGES_FLAG):
                return frozenset(argument.removeprefix(STAGES_FLAG).split(","))
    return frozenset()


def _seconds(moment: str | None) -> float:
    return 0.0 if moment is None else datetime.datetime.fromisoformat(moment).timestamp()


# On each Deployment: what its revision was made of, so that a new operator renders the same pods.
ANNOTATION_INPUTS = f"{names.GROUP}/inputs"
ANNOTATION_RESOLVED = f"{names.GROUP}/resolved"
# On Deployments of a rollout: what an old one had at first, why a new one is not tried again.
ANNOTATION_INITIAL = f"{names.GROUP}/initial"
ANNOTATION_FAILED = f"{names.GROUP}/failed"
STAGES_FLAG = "--stages="
# Kubernetes' own: pods with a lower one go first when a Deployment shrinks.
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
# On each child: the digest of what was last applied.
ANNOTATION_APPLIED = f"{names.GROUP}/applied"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a revision settled beside the manifest. A new operator keeps it, so no pod restarts.

    Attributes:
        base: digest of what the whole service must agree on; another one is another revision.
        image: for roles that name none.
        block_size: tokens of one KV block.
        compat: pods with the same value may work together.
        drain_seconds: of each role when its revision was made; a change alone restarts nothing.
        template: version of the pod template.
    """

    base: str
    image: str
    block_size: int
    compat: str
    drain_seconds: int
    template: int = 1


@dataclasses.dataclass(frozen=True)
class Revision:
    """One role and variant, as its pods are to be."""

    role: Role
    variant: str
    id: str
    inputs: str
    resolved: Resolved
