"""The settings of a manifest and its node classes that decide pool sizes. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy, MissingMetrics, WhileAtZero
from vlm_operator.api.policy import Autoscaling, Slo
from vlm_operator.api.scaling import ScaleDown, ScaleUp, Targets
from vlm_operator.autoscale.constants import CONSTANTS, Constants
from vlm_operator.names import Role

# The API's defaults, in its integer units.
_UP, _DOWN, _TARGETS, _SLO, _AUTOSCALING = ScaleUp(), ScaleDown(), Targets(), Slo(), Autoscaling()


@dataclasses.dataclass(frozen=True)
class VariantPolicy:
    """One node type of a pool.

    Attributes:
        cost_per_hour: cost of one replica (spot price on spot nodes); None if unknown.
        accelerators: devices of one replica.
        speed: work per second relative to the reference variant, which has 1.0.
        preference: tie-break after cost; the greater value first.
        max_replicas: maximum for this variant; None if unlimited.
        startup_seconds: measured 90th percentile, else the node class's expectation; None if both
            are unknown.
        node_class: VLMNodeClass of the nodes, which pools may share; None if not given.
    """

    name: str
    cost_per_hour: float | None = None
    accelerators: int = 0
    speed: float = 1.0
    spot: bool = False
    preference: int = 0
    max_replicas: int | None = None
    startup_seconds: float | None = None
    node_class: str | None = None


@dataclasses.dataclass(frozen=True)
class ZeroPolicy:
    """The rule by which the encoder pool scales to zero, and the handling of images at zero."""

    idle_seconds: float
    while_at_zero: WhileAtZero


@dataclasses.dataclass(frozen=True)
class SleepPolicy:
    """The rule by which the whole service scales to zero.

    Attributes:
        idle_seconds: time without a request after which it does.
    """

    idle_seconds: float


@dataclasses.dataclass(frozen=True)
class PoolPolicy:
    """The manifest's settings of one pool's size.

    Attributes:
        replicas: replicas in mode Manual.
        minimum, maximum: bounds in modes Auto and External.
        utilization: target busy share of an encoder or prefill replica, 0..1.
        kv_occupancy: target share of a replica's KV tokens in use, 0..1.
        up_seconds: time for which a need must last before the pool grows.
        up_pods: maximum number of pods added per minute.
        down_seconds: time for which a lower need must last before the pool shrinks.
        down_pods: maximum number of pods removed per minute.
        zero: rule for scaling to zero; None if the pool never does.
        inline: this pool encodes images if no encoder pod does.
        priority: order in which pools get replicas from a budget, the greater first. None: decode,
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
    up_seconds: float = float(_UP.stabilization_window_seconds)
    up_pods: int = _UP.max_pods_per_minute
    down_seconds: float = float(_DOWN.stabilization_window_seconds)
    down_pods: int = _DOWN.max_pods_per_minute
    zero: ZeroPolicy | None = None
    inline: bool = False
    priority: int | None = None


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Bounds of the ratio of one role's replicas to another's; None is unbounded."""

    numerator: Role
    denominator: Role
    least: float | None
    most: float | None


@dataclasses.dataclass(frozen=True)
class Budget:
    """The budget of all pools together; None is unlimited.

    Attributes:
        accelerators: maximum number of devices.
        cost_per_hour: maximum cost per hour.
        unreadable: why the cost cannot be computed (a variant's cost is unknown); "" if it can. No
            pool grows under an unreadable budget.
    """

    accelerators: int | None = None
    cost_per_hour: float | None = None
    unreadable: str = ""


@dataclasses.dataclass(frozen=True)
class ServicePolicy:
    """All settings of the manifest that a decision reads.

    Attributes:
        ttft_seconds: target of the 95th percentile of TTFT by modality ("text", "image"). A
            modality without a target has no entry.
        itl_seconds: target of the 95th percentile of ITL; None without a target.
        window_seconds: window of percentiles and shares.
        backlog_seconds: time within which a pool works off its queue.
        fallback: replicas by role after metrics have been missing for `constants.missing_seconds`.
        sleep: rule for scaling all pools to zero; None if the service never does.
    """

    pools: Mapping[Role, PoolPolicy]
    ttft_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    itl_seconds: float | None = None
    window_seconds: float = float(_SLO.window_seconds)
    budget: Budget = dataclasses.field(default_factory=Budget)
    pool_ratios: tuple[Ratio, ...] = ()
    apply: AutoscalingPolicy = _AUTOSCALING.policy
    missing: MissingMetrics = _AUTOSCALING.missing_metrics
    fallback: Mapping[Role, int] = dataclasses.field(default_factory=dict)
    interval_seconds: float = float(_AUTOSCALING.interval_seconds)
    backlog_seconds: float = float(_AUTOSCALING.backlog_seconds)
    constants: Constants = CONSTANTS
    sleep: SleepPolicy | None = None
