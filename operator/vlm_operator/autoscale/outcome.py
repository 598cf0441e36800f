"""The results of `estimate` and `decide`: values, and the closed lists of their reasons."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from vlm_operator.names import Role


class Reason(enum.StrEnum):
    """The reason of a decision. If you add one, add it to docs/autoscaling.md."""

    MANUAL = "Manual"  # the manifest sets the replicas
    PUT_BACK = "PutBack"  # another manager wrote VLMPool in mode Manual: reverted
    EXTERNAL = "External"  # VLMPool's owner sets the replicas
    FOREIGN_WRITE = "ForeignWrite"  # another manager wrote VLMPool in mode Auto: kept one window
    SCALING_CONFLICT = "ScalingConflict"  # another manager keeps writing VLMPool: held
    OFF = "Off"  # autoscaling.policy
    BOUNDS = "Bounds"  # minReplicas, maxReplicas or the budget now exclude the size
    MISSING_METRICS = "MissingMetrics"  # too few pods report: held
    FALLBACK = "Fallback"  # too few pods have reported for a long time
    STEADY = "Steady"  # the current replicas are what is needed
    SCALE_UP = "ScaleUp"  # the need exceeds the ready and starting replicas
    WAKE = "Wake"  # the first replica of a pool at zero
    SCALED_TO_ZERO = (
        "ScaledToZero"  # no request for spec.scaleToZero.idleSeconds: all pools at zero
    )
    WOKEN_BY_REQUEST = "WokenByRequest"  # a request waits at a gateway of a service at zero
    AT_ZERO = "AtZero"  # no work needs the pool
    NOT_BOTTLENECK = "NotBottleneck"  # other pools cause the wait: replicas here would not help
    UNATTAINABLE = "Unattainable"  # no number of replicas meets the target
    SCALE_DOWN = "ScaleDown"  # the need was lower for a whole window
    IDLE = "Idle"  # no images for scaleToZero.idleSeconds: the last replica is removed
    STABILIZING = "Stabilizing"  # fewer replicas would suffice, but a rule delays the scale-down
    REPLACING = "Replacing"  # a node type provided no node: another variant instead
    WAITING_FOR_DEVICES = "WaitingForDevices"  # grows once draining pods release their devices


class Bound(enum.StrEnum):
    """The bound that limited a decision. If you add one, add it to docs/autoscaling.md."""

    MIN = "Min"
    MAX = "Max"
    BUDGET = "Budget"
    BUDGET_UNREADABLE = "BudgetUnreadable"
    CAPACITY = "Capacity"  # every variant is exhausted or at its maxReplicas
    POOL_RATIO = "PoolRatio"
    MAX_PODS_PER_MINUTE = "MaxPodsPerMinute"
    UNKNOWN_TIMES = "UnknownTimes"  # service times are not credible yet: one replica at a time
    UP_WINDOW = "UpWindow"  # the need has not lasted for scaleUp.stabilizationWindowSeconds
    WINDOW = "Window"  # the need has not been lower for scaleDown.stabilizationWindowSeconds
    SLO_MARGIN = "SLOMargin"  # too close to a target, now or within the window
    ROLLOUT = "Rollout"
    FRESHNESS = "Freshness"  # too few pods answered to remove one
    IDLE_SECONDS = "IdleSeconds"  # the last replica waits for scaleToZero.idleSeconds


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The replicas that one signal asks for, in the pool's current mix of variants."""

    signal: str
    replicas: int


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The TTFT of one modality over the window, attributed to stages.

    Attributes:
        count: requests that got their first token within the window.
        missed: number of these requests beyond the target.
        p95_seconds: 95th percentile of TTFT, interpolated within a histogram bucket.
        lately_seconds: the same percentile of the last minute; None if it had too few requests.
        target_seconds: target of the 95th percentile; None without a target.
        shares: share of each stage in the TTFT of requests that missed the target, or of the
            slowest tenth. Shares sum to 1.
        service_seconds: least time of the stages that no replica can shorten, by stage.
        attainable: False if `service_seconds` alone exceed the target.
    """

    modality: str
    count: int
    missed: int
    p95_seconds: float
    target_seconds: float | None
    shares: Mapping[str, float]
    service_seconds: Mapping[str, float]
    attainable: bool = True
    lately_seconds: float | None = None

    def exceeds(self, share: float = 1.0) -> bool:
        """Whether the percentile exceeds this share of the target; the last minute takes priority.

        Without a percentile of the last minute, the one of the window counts.
        """
        seconds = self.p95_seconds if self.lately_seconds is None else self.lately_seconds
        return self.target_seconds is not None and seconds > share * self.target_seconds

    @property
    def overrun_seconds(self) -> float:
        """Seconds by which the 95th percentile exceeds its target; 0 if either is unknown."""
        if self.target_seconds is None or not self.p95_seconds > self.target_seconds:
            return 0.0
        return self.p95_seconds - self.target_seconds

    @property
    def dominant_stage(self) -> str | None:
        """The stage with the largest share; None if no share is known."""
        return max(self.shares, key=lambda name: self.shares[name], default=None)

    @property
    def blocking_stage(self) -> str | None:
        """The longest of the stages that no replica can shorten; None if there is none."""
        return max(self.service_seconds, key=lambda name: self.service_seconds[name], default=None)

    @property
    def lacking_seconds(self) -> float:
        """Seconds by which `service_seconds` alone exceed the target; 0 if they do not."""
        if self.target_seconds is None:
            return 0.0
        return max(0.0, sum(self.service_seconds.values()) - self.target_seconds)


@dataclasses.dataclass(frozen=True)
class Need:
    """The need of one pool, before bounds, budget and pace.

    Attributes:
        units: needed capacity, in replicas of speed 1.
        least_units: capacity that suffices under the stricter rule for shrinking.
        candidates: replicas that each signal asks for.
        bottleneck: the pool's own stages or its own use justify growth.
        known: False if its pods report too little; the pool is then held.
        idle: no work arrived within the window, and the reports are fresh. For a pool that may
            scale to zero: no work arrived since the last tick, and images do not justify waking it.
        message: the reason as one sentence.
        credible: service times are well enough known. If not, the pool grows and shrinks by one
            replica at a time.
    """

    role: Role
    units: float
    least_units: float
    candidates: tuple[Candidate, ...]
    bottleneck: bool
    known: bool
    idle: bool
    message: str
    credible: bool = True


@dataclasses.dataclass(frozen=True)
class Decision:
    """A pool's replicas with the reasons. Fields are named as in `status.pools.*.lastDecision`.

    Attributes:
        time: seconds since the epoch.
        before: replicas before the decision.
        to: replicas after the decision, for the pool's Deployments.
        claim: value to write to `VLMPool.spec.replicas`; None leaves the field to its owner.
        variants: `to` by variant.
        reason: a `Reason`, one CamelCase word.
        limited_by: the bound that limited the decision; None if none did.
        recommendation: replicas without Advisory mode, rollouts and holds.
        shares: share of each stage in missed TTFT, 0..1.
        cost_per_hour: cost of the pool after the decision; None if a cost is unknown.
        conflict: two field managers write the same field; the pool is held.
        held: the pool is held because metrics are missing or doubtful.
        capacity: the variants that got no node and the time of their next try; "" if there is none.
    """

    time: float
    before: int
    to: int
    claim: int | None
    reason: str
    message: str
    variants: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limited_by: str | None = None
    candidates: tuple[Candidate, ...] = ()
    recommendation: int | None = None
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cost_per_hour: float | None = None
    conflict: bool = False
    held: bool = False
    capacity: str = ""
