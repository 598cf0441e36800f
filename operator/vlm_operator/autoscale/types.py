"""What a decision is made of, and the decision. All times are seconds since the epoch."""

from __future__ import annotations

import dataclasses

from vlm_operator.api import Pool, ScalingMode
from vlm_operator.api.scaling import Behavior, Targets
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the manifest says about one pool's size.

    Attributes:
        replicas: with Manual.
        minimum: with Auto and External.
        maximum: with Auto and External.
        utilization: busy share that one encoder or prefill replica should have, 0..1.
        kv_occupancy: share of a replica's KV tokens that should be in use, 0..1.
        up_pods: most pods added in a minute; `up_share` of the pool, if that is more.
        down_seconds: how long less must have been enough.
        down_pods: most pods taken in a minute.
    """

    role: Role
    mode: ScalingMode
    replicas: int
    minimum: int
    maximum: int
    utilization: float
    kv_occupancy: float
    up_pods: int
    up_share: float
    down_seconds: float
    down_pods: int

    @classmethod
    def of(cls, role: Role, pool: Pool) -> Policy:
        """Read a pool's `scaling`, checked by `api.parse`."""
        scaling = pool.scaling
        behavior, targets = scaling.behavior or Behavior(), scaling.targets or Targets()
        return cls(
            role=role,
            mode=scaling.mode,
            replicas=scaling.replicas or 0,
            minimum=scaling.min_replicas or 0,
            maximum=scaling.max_replicas or 0,
            utilization=targets.utilization_percent / 100,
            kv_occupancy=targets.kv_occupancy_percent / 100,
            up_pods=behavior.scale_up.max_pods_per_minute,
            up_share=behavior.scale_up.max_percent_per_minute / 100,
            down_seconds=float(behavior.scale_down.stabilization_seconds),
            down_pods=behavior.scale_down.max_pods_per_minute,
        )


@dataclasses.dataclass(frozen=True)
class PoolNow:
    """One pool as it is.

    Attributes:
        replicas: `VLMPool.spec.replicas`, None where there is no VLMPool.
        owner: the field manager that wrote it last, None where unknown.
        live: replicas that the pool's Deployments ask for.
        ready: uids of pods that take work.
        starting: pods on a node that are not ready.
        pending: pods on no node.
        rolling: pods of an older revision are still there.
        cost_per_hour: of one replica, None where nobody said.
    """

    replicas: int | None
    owner: str | None
    live: int
    ready: frozenset[str]
    starting: int
    pending: int
    rolling: bool
    cost_per_hour: float | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What one signal asked for."""

    signal: str
    replicas: int


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Somebody else's number in mode Auto: the baseline for one window."""

    manager: str
    replicas: int
    since: float
    conflict: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    """A number, and everything it rests on. Named as in `status.pools.*.lastDecision`.

    Attributes:
        before: replicas before it.
        to: replicas after it, for the pool's Deployments.
        claim: what `VLMPool.spec.replicas` should say; None leaves it to its owner.
        reason: one CamelCase word.
        limited_by: the bound that held it back, None where none did.
        conflict: two managers write the same number; it is held.
        held: metrics are missing or doubtful.
    """

    time: float
    before: int
    to: int
    claim: int | None
    reason: str
    message: str
    limited_by: str | None = None
    candidates: tuple[Candidate, ...] = ()
    cost_per_hour: float | None = None
    conflict: bool = False
    held: bool = False


@dataclasses.dataclass(frozen=True)
class History:
    """What the next decision needs of those before.

    Attributes:
        since: when this memory began; nothing shrinks before one whole window of it.
        wants: (when, replicas) that were asked for within the window.
        changes: (when, from, to) of the last changes, newest last.
        decisions: the last decisions that changed something, newest last.
        work: (when, admitted work seconds by pod uid) of the last tick.
    """

    since: float
    wants: tuple[tuple[float, int], ...] = ()
    changes: tuple[tuple[float, int, int], ...] = ()
    decisions: tuple[Decision, ...] = ()
    foreign: Foreign | None = None
    work: tuple[float, tuple[tuple[str, float], ...]] | None = None
