"""Counts pods in a rollout: limits above and below a pool's size, sums over Deployments.

`maxSurge` is rounded up and `maxUnavailable` down, as in Kubernetes. If both are 0, one pod may be
unavailable, because the rollout could not progress otherwise. A surge pod counts against the
budget; surge pods that exceed it are not created.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vlm_operator.api import VLMService, quantity
from vlm_operator.api.enums import NoSpareCapacity
from vlm_operator.api.pool import PoolRollout
from vlm_operator.names import Role
from vlm_operator.rollout.target import RevisionTargets, RoleVariant, Sizes
from vlm_operator.state import DeploymentState, Key, Observed

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
        return max(1, self.surge + self.unavailable)

    @property
    def none(self) -> bool:
        return self.surge == 0 == self.unavailable

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


def surge_limits(
    service: VLMService,
    observed: Observed,
    goals: RevisionTargets,
    whole: Sizes,
    *,
    unschedulable_timeout: float,
) -> dict[Role, SurgeLimits]:
    """Return the limits of each role by pool settings, budget and free nodes.

    `whole` are the replicas of each role and variant after the rollout. If a surge pod waits for a
    node for longer than `unschedulable_timeout` seconds, an old pod ends first.
    """
    limits_by_role = {}
    for role in {name for name, _ in whole} - {Role.GATEWAY}:
        pool = service.spec.pools.of(role)
        count = sum(number for (name, _), number in whole.items() if name is role)
        limits_by_role[role] = SurgeLimits.of(
            PoolRollout() if pool is None else pool.rollout, count
        )
    for prices, limit in _budgets(service, observed):
        limits_by_role = _within(limits_by_role, prices, whole, limit)
    chosen = service.spec.rollout.when_no_spare_capacity
    if chosen is NoSpareCapacity.WAIT:
        return limits_by_role
    wanted = {(*key, goal.revision) for key, goal in goals.items()}
    stuck = {role for role, limits in limits_by_role.items() if limits.none} | {
        pod.role
        for pod in observed.pods
        if pod.pending
        and (pod.role, pod.variant, pod.revision) in wanted
        and observed.now - pod.created > unschedulable_timeout
    }
    last_too = chosen is NoSpareCapacity.DRAIN_FIRST
    return {
        role: dataclasses.replace(limits, drain_first=role in stuck, last_too=last_too)
        for role, limits in limits_by_role.items()
    }


def _budgets(
    service: VLMService, observed: Observed
) -> Iterator[tuple[dict[RoleVariant, float], float]]:
    """Yield the budget's bounds, accelerators and cost per hour, each with the use of a replica."""
    budget = service.spec.budget
    if budget is None:
        return
    devices, costs = {}, {}
    for role, pool in service.spec.pools.present.items():
        for variant in pool.variants:
            reference = variant.node_class_ref
            node_class = observed.node_classes.get(reference.name) if reference else None
            key = (role, variant.name)
            resource = node_class.accelerator if node_class else None
            devices[key] = float(variant.accelerators(resource))
            costs[key] = (node_class.cost_per_hour if node_class else None) or 0.0
    if budget.max_accelerators is not None:
        yield devices, float(budget.max_accelerators)
    if budget.max_cost_per_hour is not None:
        yield costs, float(quantity.parse(budget.max_cost_per_hour))


def _within(
    limits_by_role: Mapping[Role, SurgeLimits],
    prices: Mapping[RoleVariant, float],
    whole: Sizes,
    limit: float,
) -> dict[Role, SurgeLimits]:
    """Lower the surge limits, the last role's first, until all surge pods fit one budget.

    A role's surge pod counts as its most expensive variant. A role may end with neither surge nor
    unavailability.
    """
    lowered = dict(limits_by_role)
    each: dict[Role, float] = {}
    for (role, _), price in prices.items():
        each[role] = max(each.get(role, 0.0), price)
    steady = sum(prices.get(key, 0.0) * count for key, count in whole.items())
    for role in reversed(list(lowered)):
        limits, cost = lowered[role], each.get(role, 0.0)
        extra = sum(each.get(name, 0.0) * item.surge for name, item in lowered.items())
        excess = steady + extra - limit
        if excess <= 1e-9 or cost <= 0:
            continue
        surge = max(0, limits.surge - math.ceil(excess / cost - 1e-9))
        lowered[role] = dataclasses.replace(limits, surge=surge)
    return lowered


def desired(items: Iterable[DeploymentState]) -> int:
    return sum(item.desired for item in items)


def existing(items: Iterable[DeploymentState]) -> int:
    """Count pods that are requested or still exist, per Deployment the larger number."""
    return sum(max(item.desired, item.replicas) for item in items)


def available(items: Iterable[DeploymentState]) -> int:
    """Count pods that are available in the sense of Deployments, at most the requested ones."""
    return sum(min(item.available, item.desired) for item in items)


def initial(items: Iterable[DeploymentState]) -> int:
    return sum(item.before_rollout for item in items)


def grown(current: Mapping[str, int], target: Mapping[str, int], total: int) -> dict[str, int]:
    """Raise variants from `current` towards `target`, at most to `total` pods in sum.

    A variant above its target shrinks to it. Each added pod goes to the variant that lacks most.
    """
    sizes = {name: min(current.get(name, 0), count) for name, count in target.items()}
    while sum(sizes.values()) < min(total, sum(target.values())):
        name = max(sizes, key=lambda item: (target[item] - sizes[item], item))
        sizes[name] += 1
    return sizes


def shrunk(items: Sequence[DeploymentState], total: int, *, least: int = 0) -> dict[Key, int]:
    """Lower replicas to a sum of `total`, but not below `least`; unavailable pods go first."""
    sizes = {item.key: item.desired for item in items}
    healthy = {item.key: min(item.available, item.desired) for item in items}
    while sum(sizes.values()) > max(total, least):
        choices = [key for key, count in sizes.items() if count]
        key = max(choices, key=lambda one: (sizes[one] > healthy[one], sizes[one], one))
        sizes[key] -= 1
        healthy[key] = min(healthy[key], sizes[key])
    return sizes
