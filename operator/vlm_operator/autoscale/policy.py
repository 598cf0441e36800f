"""What a manifest and its node classes say about the size of a service's pools. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy, MissingMetrics, OnDemand
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The constants of the method, with the defaults that docs/autoscaling.md argues for.

    Attributes:
        min_requests: fewer within the window widen it threefold.
        min_misses: fewer are made up from the slowest tenth.
        slow_seconds: between two calibrations and re-weightings.
        smoothing_seconds: time constant of admitted work.
        drain_seconds: within which a backlog should be worked off.
        wait_floor_seconds: least budget for waiting in a queue.
        band_up, band_down: share of capacity in use above which a pool grows, below which it may
            shrink; between them nothing moves.
        guilty_share: least share of a pool's own stages in the overrun of TTFT.
        ttft_margin, itl_margin: share of the target that must not be exceeded before shrinking.
        consolidation: share of the waiting budget and of the KV cap that one replica fewer may use.
        after_growth_seconds: without shrinking after any pool of the service grew.
        write_off: multiple of its phase of a start after which a pod is no capacity.
        pending_seconds: without a node, before which no pod is written off that starts were seen
            of: a cluster that adds nodes takes longer than one that has some.
        spot_risk: how much dearer, as a share of its price, a spot replica counts in choosing: it
            may be taken away and must start again.
        exhausted_seconds: without another try of a variant that got no node; doubles each time.
        startup_seconds: until a variant's own is known.
        startups_kept: of each variant, for its 90th percentile.
        window_starts: multiple of the longest start that the window to shrink lasts at least.
        growth_cap: most growth that a slope may foresee within one start-up time, as a share.
        stale_ticks: without an answer after which a pod is silent.
        fresh_share: of ready pods that must answer.
        fresh_down_share: of ready pods that must answer before shrinking.
        missing_seconds: of silence before fallback replicas are taken.
        flap_changes, flap_seconds: changes of direction within a time that double the window.
        max_down_seconds: to which it may be doubled.
        fit_points, fit_spread, fit_seconds, fit_shift: least rows, least spread of the regressor,
            memory, and the change of shape that starts a fit afresh.
        warm_share: of the growth that a start-up usually sees, that is held ready beyond the load.
        forecast_days: of load that must be known before a forecast is a floor.
    """

    min_requests: int = 50
    min_misses: int = 20
    slow_seconds: float = 60.0
    smoothing_seconds: float = 30.0
    drain_seconds: float = 30.0
    wait_floor_seconds: float = 0.02
    band_up: float = 0.85
    band_down: float = 0.70
    guilty_share: float = 0.2
    ttft_margin: float = 0.9
    itl_margin: float = 0.8
    consolidation: float = 0.8
    after_growth_seconds: float = 60.0
    write_off: float = 2.0
    pending_seconds: float = 120.0
    spot_risk: float = 0.1
    exhausted_seconds: float = 600.0
    startup_seconds: float = 180.0
    startups_kept: int = 20
    window_starts: float = 2.0
    growth_cap: float = 1.0
    stale_ticks: int = 3
    fresh_share: float = 0.7
    fresh_down_share: float = 0.9
    missing_seconds: float = 300.0
    flap_changes: int = 3
    flap_seconds: float = 900.0
    max_down_seconds: float = 1800.0
    fit_points: int = 10
    fit_spread: float = 0.3
    fit_seconds: float = 1800.0
    fit_shift: float = 0.2
    warm_share: float = 0.0
    forecast_days: float = 2.0


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
    utilization: float = 0.75
    kv_occupancy: float = 0.80
    up_seconds: float = 0.0
    up_pods: int = 4
    up_share: float = 1.0
    panic: float = 2.0
    panic_hold_seconds: float = 60.0
    down_seconds: float = 300.0
    down_pods: int = 1
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
    window_seconds: float = 300.0
    budget: Budget = dataclasses.field(default_factory=Budget)
    coupling: tuple[Ratio, ...] = ()
    apply: AutoscalingPolicy = AutoscalingPolicy.ACTIVE
    missing: MissingMetrics = MissingMetrics.HOLD
    fallback: Mapping[Role, int] = dataclasses.field(default_factory=dict)
    tick_seconds: float = 5.0
    tuning: Tuning = dataclasses.field(default_factory=Tuning)
