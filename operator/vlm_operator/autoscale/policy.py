"""What a manifest and its node classes say about the size of a service's pools. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy, MissingMetrics, OnDemand
from vlm_operator.api.policy import Autoscaling, Slo
from vlm_operator.api.scaling import ScaleDown, ScaleUp, Targets
from vlm_operator.autoscale.tuning import Tuning
from vlm_operator.names import Role

# The API's own defaults, in its integers.
_UP, _DOWN, _TARGETS, _SLO, _AUTOSCALING = ScaleUp(), ScaleDown(), Targets(), Slo(), Autoscaling()


@dataclasses.dataclass(frozen=True)
class VariantPolicy:
    """One node type of a pool.

    Attributes:
        cost_per_hour: of one replica (spot price on spot nodes), None where nobody said.
        accelerators: devices of one replica.
        speed: work per second relative to the pool's other variants, 1.0 is the reference.
        preference: tie-break after cost, the greater first.
        startup_seconds: measured 90th percentile, or what the node class expects; None: neither.
    """

    name: str
    cost_per_hour: float | None = None
    accelerators: int = 0
    speed: float = 1.0
    spot: bool = False
    preference: int = 0
    max_replicas: int | None = None
    startup_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class ZeroPolicy:
    """When the encoder pool may go to zero, and what becomes of pictures meanwhile."""

    idle_seconds: float
    on_demand: OnDemand


@dataclasses.dataclass(frozen=True)
class PoolPolicy:
    """What the manifest says about one pool's size.

    Attributes:
        replicas: with Manual.
        minimum, maximum: with Auto and External.
        utilization: busy share that one encoder or prefill replica should have, 0..1.
        kv_occupancy: share of a replica's KV tokens that should be in use, 0..1.
        up_seconds: how long a need must last before the pool grows.
        up_pods: most pods added in a minute; `up_share` of the pool, if that is more.
        panic: multiple of the pool that the need must reach to be met at once.
        panic_hold_seconds: without shrinking after a panic.
        down_seconds: how long less must have been enough.
        down_pods: most pods taken in a minute.
        inline: this pool encodes pictures itself when no encoder does.
        priority: whose unmet demand goes first within a budget, the greater first; None: decode,
            then prefill, then encoder.
    """

    role: Role
    mode: ScalingMode
    replicas: int
    minimum: int
    maximum: int
    variants: tuple[VariantPolicy, ...]
    utilization: float = _TARGETS.utilization_percent / 100
    kv_occupancy: float = _TARGETS.kv_occupancy_percent / 100
    up_seconds: float = float(_UP.stabilization_seconds)
    up_pods: int = _UP.max_pods_per_minute
    up_share: float = _UP.max_percent_per_minute / 100
    panic: float = _UP.panic_percent / 100
    panic_hold_seconds: float = float(_UP.panic_hold_seconds)
    down_seconds: float = float(_DOWN.stabilization_seconds)
    down_pods: int = _DOWN.max_pods_per_minute
    zero: ZeroPolicy | None = None
    inline: bool = False
    priority: int | None = None


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Bounds on replicas of one role over replicas of another; None is no bound."""

    numerator: Role
    denominator: Role
    least: float | None
    most: float | None


@dataclasses.dataclass(frozen=True)
class Budget:
    """What all pools together may take; None is no bound.

    Attributes:
        unreadable: why the budget could not be established (an unknown cost, an unknown class), ""
            where it could. Nothing grows under an unreadable budget.
    """

    accelerators: int | None = None
    cost_per_hour: float | None = None
    unreadable: str = ""


@dataclasses.dataclass(frozen=True)
class ServicePolicy:
    """Everything that a decision takes from the manifest.

    Attributes:
        ttft_seconds: target of the 95th percentile by modality ("text", "image"); one without a
            target is not in it.
        itl_seconds: target of the 95th percentile of the time between tokens.
        window_seconds: over which percentiles and shares are taken.
        fallback: replicas by role to hold when metrics have been missing for long.
    """

    pools: Mapping[Role, PoolPolicy]
    ttft_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    itl_seconds: float | None = None
    window_seconds: float = float(_SLO.window_seconds)
    budget: Budget = dataclasses.field(default_factory=Budget)
    coupling: tuple[Ratio, ...] = ()
    apply: AutoscalingPolicy = _AUTOSCALING.policy
    missing: MissingMetrics = _AUTOSCALING.missing_metrics
    fallback: Mapping[Role, int] = dataclasses.field(default_factory=dict)
    tick_seconds: float = float(_AUTOSCALING.tick_seconds)
    tuning: Tuning = dataclasses.field(default_factory=Tuning)
