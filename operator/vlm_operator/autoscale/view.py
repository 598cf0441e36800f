"""The observed inputs of a decision: pods, their samples, current replicas. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from vlm_operator.names import Role
from vlm_operator.state import Sample

PodPhase = Literal["pending", "starting", "ready", "draining"]


@dataclasses.dataclass(frozen=True)
class PodView:
    """One pod of a pool.

    Attributes:
        phase: pending (without a node), starting, ready (accepts work), draining.
        created: seconds since the epoch.
        ready_since: seconds since the epoch at which the pod began to accept work; None before.
        scheduled_since: seconds since the epoch at which it got its node; None if unknown.
        served: its containers were ready at least once.
        became_ready: seconds since the epoch at which it last became ready. Later than
            `ready_since` if it was not ready in between. None if it is not ready or unknown.
        unready_since: seconds since the epoch at which it last stopped being ready; None if it is
            ready or unknown.
        revision: that of its Deployment; "" if unknown.
        placement: digest of what decides on which nodes it fits; "" if unknown.
    """

    uid: str
    variant: str
    phase: PodPhase
    created: float
    ready_since: float | None = None
    scheduled_since: float | None = None
    served: bool = False
    became_ready: float | None = None
    unready_since: float | None = None
    revision: str = ""
    placement: str = ""


@dataclasses.dataclass(frozen=True)
class PoolView:
    """The observed state of one pool.

    Attributes:
        replicas: `VLMPool.spec.replicas`; None if there is no VLMPool.
        owner: the field manager that owns `spec.replicas`; None if unknown.
        live: replicas that the pool's Deployments request, by variant.
        pods: all pods that have not ended. Draining ones are included, because they hold devices.
        rolling: pods of an older revision exist.
        revisions: revision that new pods get, by variant; no entry if unknown.
        placements: placement of such pods, by variant; no entry before their Deployment exists.
    """

    replicas: int | None
    owner: str | None
    live: Mapping[str, int]
    pods: tuple[PodView, ...]
    rolling: bool = False
    revisions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    placements: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, phase: PodPhase) -> tuple[PodView, ...]:
        """Return the pods in one phase."""
        return tuple(pod for pod in self.pods if pod.phase == phase)


@dataclasses.dataclass(frozen=True)
class View:
    """All observed inputs at one time.

    Attributes:
        now: seconds since the epoch.
        samples: fresh samples by pod uid, gateways included. A pod without an entry did not answer.
        gateways: uids of the gateway pods that may have requests.
    """

    now: float
    pools: Mapping[Role, PoolView]
    samples: Mapping[str, Sample]
    gateways: tuple[str, ...] = ()
