"""What a decision is made from: pods, their samples, the numbers that stand. Values only."""

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
        phase: pending (on no node), starting, ready (takes work), draining.
        created: seconds since the epoch.
        ready_since: seconds since the epoch; None until it takes work.
        scheduled_since: when it got its node, seconds since the epoch; None where unknown.
        served: its containers were ready at least once.
        became_ready: when it last became ready, seconds since the epoch; later than `ready_since`
            if it was not ready in between. None while it is not, or where unknown.
        unready_since: when it last ceased to be ready, seconds since the epoch; None while it is,
            or where unknown.
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


@dataclasses.dataclass(frozen=True)
class PoolView:
    """One pool as it is.

    Attributes:
        replicas: `VLMPool.spec.replicas`, None where there is no VLMPool.
        owner: the field manager that wrote it last, None where unknown.
        live: replicas that the pool's Deployments ask for, by variant.
        pods: all that have not ended, draining ones included: they hold their devices.
        rolling: pods of an older revision are still there.
    """

    replicas: int | None
    owner: str | None
    live: Mapping[str, int]
    pods: tuple[PodView, ...]
    rolling: bool = False

    def of(self, phase: PodPhase) -> tuple[PodView, ...]:
        """The pods in one phase."""
        return tuple(pod for pod in self.pods if pod.phase == phase)


@dataclasses.dataclass(frozen=True)
class View:
    """Everything seen at one moment.

    Attributes:
        now: seconds since the epoch.
        samples: fresh reports by pod uid, gateways included; what is missing did not answer.
    """

    now: float
    pools: Mapping[Role, PoolView]
    samples: Mapping[str, Sample]
