"""Counts pods in a rollout: limits above and below a pool's size, sums over Deployments.

`maxSurge` is rounded up and `maxUnavailable` down, as in Kubernetes. If both are 0, one pod may be
unavailable, because the rollout could not progress otherwise. A surge pod counts against the
budget; surge pods that exceed it are not created.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.api.pool import PoolRollout
from vlm_operator.names import Role
from vlm_operator.state import DeploymentState, Key

_SURGE, _UNAVAILABLE = "1", "0"


@dataclasses.dataclass(frozen=True)
class SurgeLimits:
    """The limits of a rollout in one pool.

    Attributes:
        surge: maximum number of pods above the target, old and new together.
        unavailable: maximum number of pods below the target.
        drain_first: one old pod may end before its successor starts: no node fits a surge pod.
        last_too: with `drain_first`, that pod may be the last ready one.
    """

    surge: int
    unavailable: int
    drain_first: bool = False
    last_too: bool = False

    @property
    def batch(self) -> int:
        """Number of pods that one step may replace."""
        return max(1, self.surge + self.unavailable)

    @property
    def gives_last(self) -> bool:
        """Whether a pool's last ready pod may end before its successor starts."""
        return self.drain_first and self.last_too

    def floor(self, target: int) -> int:
        """Return how many pods must stay available; at least 1 if a successor fits beside it."""
        least = max(0, target - self.unavailable)
        if self.drain_first:
            least = max(0 if self.last_too else min(1, least), least - 1)
        fits = target > 0 and target + self.surge >= 2 and not self.gives_last
        return max(int(fits), least)

    @classmethod
    def of(cls, rollout: PoolRollout, target: int) -> SurgeLimits:
        """Read a pool's settings; percentages are relative to `target`."""
        surge = share(rollout.max_surge or _SURGE, target, up=True)
        unavailable = share(rollout.max_unavailable or _UNAVAILABLE, target, up=False)
        if surge == unavailable == 0:
            unavailable = 1
        return cls(surge, unavailable)


def share(text: str, of: int, *, up: bool) -> int:
    """Convert a count or a percentage to pods: `25%` of 5 is 2 rounded up, 1 rounded down."""
    if not text.endswith("%"):
        return int(text)
    exact = int(text[:-1]) * of / 100
    return math.ceil(exact) if up else math.floor(exact)


@dataclasses.dataclass(frozen=True)
class BudgetUse:
    """The use of one budget, in its unit (devices, or cost per hour).

    Attributes:
        each: use of one replica of each role's most expensive variant.
        steady: use of all pools at their targets.
        limit: the budget; None if it is unlimited.
    """

    each: Mapping[Role, float]
    steady: float
    limit: float | None


def within_budget(
    limits_by_role: Mapping[Role, SurgeLimits], budget_uses: Iterable[BudgetUse]
) -> dict[Role, SurgeLimits]:
    """Lower the surge limits, the last role's first, until all surge pods fit every budget.

    A role may end with neither surge nor unavailability.
    """
    found = dict(limits_by_role)
    for use in budget_uses:
        if use.limit is None:
            continue
        for role in reversed(list(found)):
            limits, cost = found[role], use.each.get(role, 0.0)
            extra = sum(use.each.get(name, 0.0) * item.surge for name, item in found.items())
            excess = use.steady + extra - use.limit
            if excess <= 1e-9 or cost <= 0:
                continue
            surge = max(0, limits.surge - math.ceil(excess / cost - 1e-9))
            found[role] = dataclasses.replace(limits, surge=surge)
    return found


def desired(items: Iterable[DeploymentState]) -> int:
    """Sum `spec.replicas`."""
    return sum(item.desired for item in items)


def existing(items: Iterable[DeploymentState]) -> int:
    """Count pods that are requested or still exist, per Deployment the larger number."""
    return sum(max(item.desired, item.replicas) for item in items)


def available(items: Iterable[DeploymentState]) -> int:
    """Count pods that are available in the sense of Deployments, at most the requested ones."""
    return sum(min(item.available, item.desired) for item in items)


def initial(items: Iterable[DeploymentState]) -> int:
    """Sum the replicas from before the rollout removed the first pod."""
    return sum(item.before_rollout for item in items)


def grown(current: Mapping[str, int], target: Mapping[str, int], total: int) -> dict[str, int]:
    """Raise variants from `current` towards `target`, at most to `total` pods in sum.

    A variant above its target shrinks to it. Each added pod goes to the variant that lacks most.
    """
    found = {name: min(current.get(name, 0), count) for name, count in target.items()}
    while sum(found.values()) < min(total, sum(target.values())):
        name = max(found, key=lambda item: (target[item] - found[item], item))
        found[name] += 1
    return found


def shrunk(items: Sequence[DeploymentState], total: int, *, least: int = 0) -> dict[Key, int]:
    """Lower replicas to a sum of `total`, but not below `least`; unavailable pods go first."""
    found = {item.key: item.desired for item in items}
    healthy = {item.key: min(item.available, item.desired) for item in items}
    while sum(found.values()) > max(total, least):
        choices = [key for key, count in found.items() if count]
        key = max(choices, key=lambda one: (found[one] > healthy[one], found[one], one))
        found[key] -= 1
        healthy[key] = min(healthy[key], found[key])
    return found
