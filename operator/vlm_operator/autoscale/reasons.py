"""Why a pool has its size: the closed lists of reasons and bounds, as status, metrics, events say.

Adding one is a change of docs/autoscaling.md, too.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """What decided."""

    MANUAL = "Manual"  # the manifest says the number
    PUT_BACK = "PutBack"  # somebody wrote VLMPool in mode Manual
    EXTERNAL = "External"  # whoever writes VLMPool says the number
    FOREIGN_WRITE = "ForeignWrite"  # somebody wrote VLMPool in mode Auto: kept for one window
    SCALING_CONFLICT = "ScalingConflict"  # and keeps writing it: held
    OFF = "Off"  # autoscaling.policy
    BOUNDS = "Bounds"  # minReplicas, maxReplicas or the budget moved past the pool
    MISSING_METRICS = "MissingMetrics"  # held: too little is known
    FALLBACK = "Fallback"  # too little has been known for long
    STEADY = "Steady"  # what stands is what is needed
    SCALE_UP = "ScaleUp"  # more is needed than stands and starts
    PANIC = "Panic"  # a multiple is needed: no limit of pace
    WAKE = "Wake"  # the first replica of a pool at zero
    AT_ZERO = "AtZero"  # nothing asks for the pool
    NOT_GUILTY = "NotGuilty"  # time is lost elsewhere: more replicas here would not help
    UNATTAINABLE = "Unattainable"  # no number of replicas meets the target
    SCALE_DOWN = "ScaleDown"  # a whole window needed less
    IDLE = "Idle"  # the last replica goes: no pictures for scaleToZero.idleSeconds
    CANCEL_PENDING = "CancelPending"  # pods without a node that nothing needs any more
    STABILIZING = "Stabilizing"  # fewer would do, and one of the rules for shrinking waits
    REPLACING = "Replacing"  # a node type gave no node: another one instead
    WAITING_FOR_DEVICES = "WaitingForDevices"  # grows once draining pods have given theirs back


class Bound(enum.StrEnum):
    """What held a decision back."""

    MIN = "Min"
    MAX = "Max"
    BUDGET = "Budget"
    BUDGET_UNREADABLE = "BudgetUnreadable"
    CAPACITY = "Capacity"  # node types exhausted, or at their own maxReplicas
    COUPLING = "Coupling"
    MAX_PODS_PER_MINUTE = "MaxPodsPerMinute"
    UNKNOWN_TIMES = "UnknownTimes"  # service times are not credible yet: one replica at a time
    UP_WINDOW = "UpWindow"  # the need has not lasted for scaleUp.stabilizationSeconds
    WINDOW = "Window"  # one whole window has not said so yet
    SLO_MARGIN = "SLOMargin"  # too close to a target, or has been within the window
    RECENT_GROWTH = "RecentGrowth"  # a pool of the service has just grown
    ROLLOUT = "Rollout"
    FRESHNESS = "Freshness"  # too few pods answered to take one away
    PANIC_HOLD = "PanicHold"
    IDLE_SECONDS = "IdleSeconds"  # the last replica waits for scaleToZero.idleSeconds
