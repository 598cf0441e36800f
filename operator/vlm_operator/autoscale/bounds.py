"""The inputs of one pool's decision, and the bounds that a rule sets on its replicas in this tick.

ownership, pace ─▶ PoolContext.bounds(reason, message, …) ─▶ ReplicaBounds ─▶ allocate
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vlm_operator.autoscale.capacity import PoolCapacity, startup_seconds
from vlm_operator.autoscale.estimate import Estimate
from vlm_operator.autoscale.history import ScalingHistory
from vlm_operator.autoscale.outcome import Bound, Need, Reason
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PoolView, View

EPSILON = 1e-6  # units; smaller differences of capacity do not count


@dataclasses.dataclass(frozen=True)
class ReplicaBounds:
    """Bounds on one pool's replicas in this tick, with the reason.

    Attributes:
        context: inputs of the pool, with its history after this tick.
        least, most: bounds on the sum over variants.
        need: needed units of capacity; 0 if `least` alone decides.
        lower, upper: bounds by variant.
        caps: `upper` if the pool grows for the sake of a ratio.
        limited_by: the bound that limits a pool that meets `need`.
        paced_by: the bound that keeps `most` below the need.
        spare: replicas that the pool may add for the sake of a ratio.
        claim: the operator writes the decision to VLMPool.
        conflict, held: as in Decision.
    """

    context: PoolContext
    least: int
    most: int
    need: float
    lower: Mapping[str, int]
    upper: Mapping[str, int]
    caps: Mapping[str, int]
    reason: Reason
    message: str
    limited_by: Bound | None = None
    paced_by: Bound = Bound.MAX_PODS_PER_MINUTE
    spare: int = 0
    claim: bool = True
    conflict: bool = False
    held: bool = False


@dataclasses.dataclass(frozen=True)
class PoolContext:
    """All inputs of one pool's decision.

    Attributes:
        strained_at: as in ScalingMemory.
    """

    service: ServicePolicy
    policy: PoolPolicy
    view: View
    pool: PoolView
    estimate: Estimate
    capacity: PoolCapacity
    history: ScalingHistory
    strained_at: float | None

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self.view.now

    @property
    def current(self) -> Mapping[str, int]:
        """Replicas of the last decision, by variant."""
        return self.capacity.current

    @property
    def before(self) -> int:
        """Replicas of the last decision."""
        return sum(self.current.values())

    @property
    def need(self) -> Need | None:
        """Need of the pool; None if it is unknown, or not a finite number of at least 0."""
        found = self.estimate.needs.get(self.policy.role)
        if found is None or not found.known:
            return None
        valid = all(math.isfinite(item) and item >= 0 for item in (found.units, found.least_units))
        return found if valid else None

    @property
    def speeds(self) -> dict[str, float]:
        """Units of one replica, by variant."""
        return {item.name: item.speed for item in self.policy.variants}

    @property
    def supply(self) -> float:
        """Units of the current replicas; overdue pods do not count."""
        return sum(
            speed * (self.current[name] - self.capacity.overdue[name])
            for name, speed in self.speeds.items()
        )

    @property
    def window(self) -> float:
        """Seconds for which the need must stay lower before the pool shrinks."""
        starts = (
            startup_seconds(self.service, self.policy.role, name, self.estimate)
            for name, count in self.current.items()
            if count
        )
        factor = self.service.constants.window_starts
        return max(self.policy.down_seconds, factor * max(starts, default=0.0))

    def with_history(self, **changes: Any) -> PoolContext:
        """Replace fields of the history."""
        return dataclasses.replace(self, history=dataclasses.replace(self.history, **changes))

    def caps(self, *, keep: bool) -> dict[str, int]:
        """Most replicas by variant: its own maximum, and no more than now if it is exhausted.

        After the wait an exhausted variant may get one pod, and the next one only when that pod has
        its node. During the wait the variant loses its unschedulable pods, as far as other variants
        can replace them. If `keep`, it loses none: pending pods make a cluster add nodes.
        """
        most = max(self.policy.maximum, self.policy.replicas, self.before)
        found = {
            item.name: most if item.max_replicas is None else item.max_replicas
            for item in self.policy.variants
        }
        exhausted = self.history.exhausted
        waiting = {name for name, item in exhausted.items() if self.now < item.until}
        for name in found.keys() & (exhausted.keys() - waiting):
            tries = 0 if self.capacity.pending[name] else 1
            found[name] = min(found[name], self.current[name] + tries)
        others = sum(
            max(0, most - self.current[name]) for name, most in found.items() if name not in waiting
        )
        for name in [name for name in found if name in waiting]:
            removed = 0 if keep else min(self.capacity.unschedulable[name], others)
            others -= removed
            found[name] = min(found[name], self.current[name] - removed)
        return found

    def bounds(
        self,
        reason: Reason,
        message: str,
        *,
        replicas: int | None = None,
        grow: int = 0,
        shrink: int = 0,
        need: float | None = None,
        limited_by: Bound | None = None,
        claim: bool = True,
        conflict: bool = False,
        held: bool = False,
    ) -> ReplicaBounds:
        """Set the bounds of this tick: a number, or a range around the current replicas.

        `replicas` is the number; the need is then ignored. `grow` and `shrink` are replicas that
        the pool may add, up to its maximum, or remove. `need` is in units; None is the capacity of
        the current replicas. The other arguments are fields of ReplicaBounds.
        """
        current, caps = self.current, self.caps(keep=held or shrink > 0)
        grow = min(grow, max(0, self.policy.maximum - self.before))
        least, most = self.before - shrink, self.before + grow
        if replicas is not None:
            least = most = replicas
            need = 0.0
        units = self.supply if need is None else need
        available = sum(min(count, caps[name]) for name, count in current.items())
        starts = most > available and not shrink  # new replicas, or replacements of removed ones
        removable = 0 if starts else max(0, self.before - least)
        upper = {
            name: caps[name] if starts else min(caps[name], count)
            for name, count in current.items()
        }
        return ReplicaBounds(
            context=self,
            least=min(max(least, 0), sum(upper.values())),
            most=most,
            need=units if grow else min(units, self.supply),
            lower={name: min(upper[name], max(0, current[name] - removable)) for name in upper},
            upper=upper,
            caps=caps,
            reason=reason,
            message=message,
            limited_by=limited_by,
            claim=claim,
            conflict=conflict,
            held=held,
        )
