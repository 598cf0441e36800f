"""What a pool may become in this tick: bounds for the solver, and why they are so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.capacity import PoolCapacity, startup_seconds
from vlm_operator.autoscale.estimate import Estimate
from vlm_operator.autoscale.history import ScalingHistory, ScalingMemory
from vlm_operator.autoscale.outcome import Bound, Need, Reason
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PoolView, View
from vlm_operator.names import Role

# Two capacities that differ by less are the same.
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class ReplicaBounds:
    """Bounds on one pool's replicas in this tick.

    Attributes:
        least, most: replicas.
        need: units of capacity that count, overdue pods apart; 0 where `least` says it all.
        lower, upper: by variant.
        caps: most of each variant, were the pool to grow.
        paced_by: what keeps `most` below the need, where it does.
        spare: replicas that may be added for the sake of a ratio to another pool.
        claim: VLMPool follows the decision; else it is left to its owner.
        conflict, held: as in Decision.
    """

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
    """All inputs of one pool's bounds."""

    service: ServicePolicy
    policy: PoolPolicy
    view: View
    pool: PoolView
    estimate: Estimate
    capacity: PoolCapacity
    pace: ScalingHistory
    memory: ScalingMemory

    @property
    def role(self) -> Role:
        """The pool's."""
        return self.policy.role

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self.view.now

    @property
    def need(self) -> Need | None:
        """What the pool needs; None where that is not known, or no number."""
        found = self.estimate.needs.get(self.role)
        if found is None or not found.known:
            return None
        sane = all(math.isfinite(item) and item >= 0 for item in (found.units, found.least_units))
        return found if sane else None

    @property
    def before(self) -> int:
        """Replicas that stand."""
        return self.capacity.replicas

    @property
    def speeds(self) -> dict[str, float]:
        """Units of one replica by variant."""
        return {item.name: item.speed for item in self.policy.variants}

    @property
    def supply(self) -> float:
        """Units that stand or start; pods that should have taken work long ago are none."""
        return sum(
            speed * (self.capacity.standing.get(name, 0) - self.capacity.overdue.get(name, 0))
            for name, speed in self.speeds.items()
        )

    @property
    def window(self) -> float:
        """Seconds that less must have been enough before the pool shrinks."""
        constants = self.service.constants
        starts = [
            startup_seconds(self.role, item, self.estimate, constants)
            for item in self.policy.variants
            if self.capacity.standing.get(item.name)
        ]
        longest = max(starts, default=0.0)
        return max(self.policy.down_seconds, constants.window_starts * longest)

    def caps(self, *, keep: bool = False) -> dict[str, int]:
        """Most replicas of each variant: its own maximum, and none more of an exhausted one.

        After its time without a try an exhausted type gets one pod, and no second one before that
        one has its node: a whole pool does not wait for nodes that may still be lacking.
        Pods that wait for a node of an exhausted type are given up only where another type takes
        their place, and not while `keep`: they are what makes a cluster add nodes.
        """
        found = {}
        tried = {name for name, item in self.pace.exhausted.items() if self.now < item.until}
        most = max(self.policy.maximum, self.policy.replicas, self.before)
        for item in self.policy.variants:
            found[item.name] = most if item.max_replicas is None else item.max_replicas
        for name in found.keys() & (self.pace.exhausted.keys() - tried):
            probe = 0 if self.capacity.pending.get(name) else 1
            found[name] = min(found[name], self.capacity.standing.get(name, 0) + probe)
        others = sum(
            max(0, cap - self.capacity.standing.get(name, 0))
            for name, cap in found.items()
            if name not in tried
        )
        for name in [item for item in found if item in tried]:
            standing, stuck = self.capacity.standing.get(name, 0), self.capacity.stuck.get(name, 0)
            given_up = 0 if keep else min(stuck, others)
            others -= given_up
            found[name] = min(found[name], standing - given_up)
        return found

    def bounds(
        self,
        reason: Reason,
        message: str,
        *,
        grow: int = 0,
        shrink: int = 0,
        need: float | None = None,
        limited_by: Bound | None = None,
        held: bool = False,
    ) -> ReplicaBounds:
        """Let the pool grow or shrink by so many replicas, or stand as it is.

        `need` is in units, None keeps what stands.
        """
        standing, caps = self.capacity.standing, self.caps(keep=held or shrink > 0)
        lost = any(count > caps[name] for name, count in standing.items())
        lower, upper = {}, {}
        for name, count in standing.items():
            upper[name] = caps[name] if (grow or lost) and not shrink else min(caps[name], count)
            lower[name] = min(upper[name], count - min(shrink, count))
        units = self.supply if need is None else need
        return ReplicaBounds(
            least=min(max(self.before - shrink, 0), sum(upper.values())),
            most=self.before + grow,
            need=units if grow else min(units, self.supply),
            lower=lower,
            upper=upper,
            caps=caps,
            reason=reason,
            message=message,
            limited_by=limited_by,
            held=held,
        )

    def exactly(
        self,
        count: int,
        reason: Reason,
        message: str,
        *,
        limited_by: Bound | None = None,
        claim: bool = True,
        conflict: bool = False,
        held: bool = False,
    ) -> ReplicaBounds:
        """Let the pool have `count` replicas, whatever it needs."""
        standing, caps = self.capacity.standing, self.caps(keep=held)
        grows = count > sum(min(item, caps[name]) for name, item in standing.items())
        upper = {
            name: caps[name] if grows else min(caps[name], standing[name]) for name in standing
        }
        lower = {name: min(upper[name], standing[name]) if grows else 0 for name in standing}
        return ReplicaBounds(
            least=min(count, sum(upper.values())),
            most=count,
            need=0.0,
            lower=lower,
            upper=upper,
            caps=caps,
            reason=reason,
            message=message,
            limited_by=limited_by,
            claim=claim,
            conflict=conflict,
            held=held,
        )
