"""The closed lists of reasons and bounds of a decision, as used in status, metrics and events.

If you add one, add it to docs/autoscaling.md.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """The reason of a decision."""

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
    AT_ZERO = "AtZero"  # no work needs the pool
    NOT_BOTTLENECK = "NotBottleneck"  # other pools cause the wait: replicas here would not help
    UNATTAINABLE = "Unattainable"  # no number of replicas meets the target
    SCALE_DOWN = "ScaleDown"  # the need was lower for a whole window
    IDLE = "Idle"  # no images for scaleToZero.idleSeconds: the last replica is removed
    CANCEL_PENDING = "CancelPending"  # removes pods without a node that are no longer needed
    STABILIZING = "Stabilizing"  # fewer replicas would suffice, but a rule delays the scale-down
    REPLACING = "Replacing"  # a node type provided no node: another variant instead
    WAITING_FOR_DEVICES = "WaitingForDevices"  # grows once draining pods release their devices


class Bound(enum.StrEnum):
    """The bound that limited a decision."""

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
    RECENT_GROWTH = "RecentGrowth"  # a pool of the service has just grown
    ROLLOUT = "Rollout"
    FRESHNESS = "Freshness"  # too few pods answered to remove one
    IDLE_SECONDS = "IdleSeconds"  # the last replica waits for scaleToZero.idleSeconds
