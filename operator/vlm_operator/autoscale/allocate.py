"""Chooses the replicas of all pools: the cheapest mix of variants within ratios and the budget.

ReplicaBounds of each pool ─▶ Problem ─▶ solve ─▶ target ─▶ _admit ─▶ replicas of this tick

If the program has no solution, pools may grow for the sake of a ratio. If that does not suffice,
ratios are dropped, and then `fill` shares the budget.

The target ignores pods that drain. `_admit` grows only into devices that no pod holds, and keeps a
replica of a pool at its minimum until its replacement is admitted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from vlm_operator.autoscale.bounds import ReplicaBounds
from vlm_operator.autoscale.capacity import startup_seconds
from vlm_operator.autoscale.outcome import Bound
from vlm_operator.autoscale.policy import Budget, ServicePolicy, VariantPolicy
from vlm_operator.autoscale.solve import (
    MICROS,
    Choice,
    PoolProblem,
    Problem,
    Vector,
    fill,
    solve,
)
from vlm_operator.names import Role

WEIGHTS = {Role.DECODE: 3.0, Role.PREFILL: 2.0, Role.ENCODER: 1.0}
Bounds = Mapping[Role, ReplicaBounds]
Counts = dict[Role, dict[str, int]]  # replicas by role and variant


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The replicas of one pool.

    Attributes:
        variants: replicas of this tick, by variant.
        target: replicas when draining pods have released their devices.
        limited_by: the bound that keeps the pool from its need; None if it is met.
    """

    variants: Mapping[str, int]
    target: int
    limited_by: Bound | None

    @property
    def replicas(self) -> int:
        """Replicas of this tick."""
        return sum(self.variants.values())


def allocate(policy: ServicePolicy, bounds: Bounds) -> dict[Role, Allocation]:
    """Choose the replicas of every pool, by variant."""
    budget = policy.budget
    if budget.unreadable:
        bounds = {role: _without_growth(item) for role, item in bounds.items()}
        budget = Budget()
    cost = budget.cost_per_hour
    problem = Problem(
        tuple(_pool_problem(item) for item in bounds.values()),
        policy.pool_ratios,
        budget.accelerators,
        None if cost is None else math.floor(cost * MICROS + 0.5),
    )
    counts, given_up = _solve(problem, bounds)
    target = {
        pool.role: dict(zip((c.name for c in pool.choices), counts[pool.role], strict=True))
        for pool in problem.pools
    }
    _keep_pending(problem, bounds, target)
    admitted = _admit(problem, bounds, target)
    return {
        pool.role: Allocation(
            variants=admitted[pool.role],
            target=sum(target[pool.role].values()),
            limited_by=_limit(pool, bounds[pool.role], target[pool.role], given_up=given_up),
        )
        for pool in problem.pools
    }


def _without_growth(bounds: ReplicaBounds) -> ReplicaBounds:
    """The same bounds without growth beyond minReplicas, for a budget that cannot be computed."""
    context, before = bounds.context, bounds.context.before
    if context.pool.replicas is None or bounds.most <= max(before, context.policy.minimum):
        return bounds
    return dataclasses.replace(
        bounds,
        least=min(bounds.least, before),
        most=min(bounds.most, before),
        upper=context.current,
        lower={name: min(count, context.current[name]) for name, count in bounds.lower.items()},
        spare=0,
    )


def _pool_problem(bounds: ReplicaBounds) -> PoolProblem:
    """One pool in integers. Its need is at most what its own bounds allow."""
    context = bounds.context
    policy, need = context.policy, context.need
    needed_now = bounds.need if need is None or bounds.held else min(need.units, bounds.need)
    pool = PoolProblem(
        role=policy.role,
        need=_thousandths(bounds.need),
        core=_thousandths(needed_now),
        least=bounds.least,
        most=bounds.most,
        floor=min(bounds.least, max(policy.minimum, policy.replicas)),
        weight=WEIGHTS.get(policy.role, 1.0) if policy.priority is None else policy.priority + 1.0,
        choices=tuple(_choice(bounds, item) for item in policy.variants),
    )
    reach = fill(Problem((pool,)))[pool.role]
    return dataclasses.replace(pool, need=min(pool.need, pool.units(reach)))


def _choice(bounds: ReplicaBounds, variant: VariantPolicy) -> Choice:
    context, name = bounds.context, variant.name
    constants = context.service.constants
    cost, price, start = _micros(variant), round(MICROS), 0
    if all(item.cost_per_hour is not None for item in context.policy.variants):
        price = round(cost * (1 + constants.spot_risk if variant.spot else 1))
        seconds = startup_seconds(context.service, context.policy.role, name, context.estimate)
        start = round(price * (seconds / max(context.window, 1.0)))
    return Choice(
        name=name,
        least=bounds.lower[name],
        most=bounds.upper[name],
        current=context.current[name],
        speed=max(1, round(variant.speed * 1000)),
        cost=cost,
        price=price,
        start=start,
        accelerators=variant.accelerators,
        preference=variant.preference,
        overdue=context.capacity.overdue[name],
    )


def _micros(variant: VariantPolicy) -> int:
    return round((variant.cost_per_hour or 0.0) * MICROS)


def _thousandths(units: float) -> int:
    return math.ceil(min(units, 1e9) * 1000 - 1e-3)


def _solve(problem: Problem, bounds: Bounds) -> tuple[dict[Role, Vector], Bound | None]:
    """Return the counts of each pool, and the constraint that was given up for them."""
    found = solve(problem)
    if found is not None:
        return found, None
    if problem.ratios:
        pools = tuple(_pool_problem(_with_spare(item)) for item in bounds.values())
        found = solve(dataclasses.replace(problem, pools=pools))
        if found is None:
            found = solve(dataclasses.replace(problem, ratios=()))
        if found is not None:
            return found, Bound.POOL_RATIO
    return fill(problem), Bound.BUDGET


def _with_spare(bounds: ReplicaBounds) -> ReplicaBounds:
    """The same bounds with growth for the sake of a ratio."""
    before = bounds.context.before
    if bounds.spare <= 0 or before == 0:
        return bounds
    return dataclasses.replace(
        bounds, most=max(bounds.most, before + bounds.spare), upper=bounds.caps
    )


def _keep_pending(problem: Problem, bounds: Bounds, target: Counts) -> None:
    """Put unschedulable replicas back into `target` if no other variant replaces them.

    Their pods continue to wait for a node. If the pool is below its minimum without them, other
    pools give up growth for them.
    """
    for role, counts in target.items():
        context = bounds[role].context
        for name, unschedulable in context.capacity.unschedulable.items():
            removed = min(unschedulable, context.current[name] - counts[name])
            for _ in range(min(removed, bounds[role].least - sum(counts.values()))):
                counts[name] += 1
                if sum(counts.values()) <= context.policy.minimum:
                    _give_up_growth(problem, bounds, target, beneficiary=role)
                if not _affordable(problem, target):
                    counts[name] -= 1
                    break


def _give_up_growth(problem: Problem, bounds: Bounds, target: Counts, *, beneficiary: Role) -> None:
    """Remove growth of other pools from `target` until the budget allows it."""
    for role, counts in target.items():
        context = bounds[role].context
        for name, current in context.current.items():
            while (
                role is not beneficiary
                and counts[name] > current
                and sum(counts.values()) > max(context.before, context.policy.minimum)
                and not _affordable(problem, target)
            ):
                counts[name] -= 1


def _affordable(problem: Problem, target: Counts) -> bool:
    return problem.affords_counts({role: list(found.values()) for role, found in target.items()})


def _admit(problem: Problem, bounds: Bounds, target: Counts) -> Counts:
    """Return the part of the target that fits the budget beside the pods that hold devices now."""
    admitted = {
        role: {
            name: min(count, bounds[role].context.current[name]) for name, count in found.items()
        }
        for role, found in target.items()
    }
    totals = {role: sum(found.values()) for role, found in target.items()}
    for role, counts in admitted.items():
        _keep_minimum(bounds[role], counts, totals[role], unschedulable=False)
    for pool in sorted(problem.pools, key=lambda item: -item.weight):
        role, counts = pool.role, admitted[pool.role]
        for name, count in target[role].items():
            while counts[name] < count and sum(counts.values()) < totals[role]:
                counts[name] += 1
                if not _devices_free(problem, bounds, admitted):
                    counts[name] -= 1
                    break
        _keep_minimum(bounds[role], counts, totals[role], unschedulable=True)
    return admitted


def _keep_minimum(
    bounds: ReplicaBounds, counts: dict[str, int], total: int, *, unschedulable: bool
) -> None:
    """Put current replicas back into `counts` that would leave the pool below its minimum.

    Replicas with unschedulable pods are put back only if `unschedulable`.
    """
    context = bounds.context
    floor = min(total, context.before, bounds.least if bounds.held else context.policy.minimum)
    for name, current in context.current.items():
        most = current if unschedulable else current - context.capacity.unschedulable[name]
        counts[name] += max(0, min(floor - sum(counts.values()), most - counts[name]))


def _devices_free(problem: Problem, bounds: Bounds, target: Counts) -> bool:
    """Whether all pods on the way to `target`, draining ones included, fit the budget.

    A pod of a variant that the manifest no longer has counts as the most expensive variant.
    """
    if problem.accelerators is None and problem.cost is None:
        return True
    accelerators = cost = 0
    for role, counts in target.items():
        variants, pool = bounds[role].context.policy.variants, bounds[role].context.pool
        draining = Counter(pod.variant for pod in pool.pods if pod.phase == "draining")
        others = Counter(pod.variant for pod in pool.pods if pod.phase != "draining")
        for name in {*counts, *draining, *others, *pool.live}:
            pods = draining[name] + max(counts.get(name, 0), others[name])
            pods = max(pods, pool.live.get(name, 0))
            known = [item for item in variants if item.name == name] or variants
            accelerators += pods * max((item.accelerators for item in known), default=0)
            cost += pods * max((_micros(item) for item in known), default=0)
    return problem.affords(accelerators, cost)


def _limit(
    pool: PoolProblem, bounds: ReplicaBounds, target: Mapping[str, int], *, given_up: Bound | None
) -> Bound | None:
    """The bound that keeps a pool from its need; `given_up` is the constraint that was dropped."""
    context, need = bounds.context, _thousandths(bounds.need)
    total, units = sum(target.values()), pool.units(tuple(target.values()))
    if context.service.budget.unreadable and units < need:
        return Bound.BUDGET_UNREADABLE
    if total < bounds.least or units < pool.need:
        return given_up or Bound.CAPACITY
    if given_up is Bound.POOL_RATIO and total != context.before == bounds.most:
        return Bound.POOL_RATIO
    if units >= need:
        return bounds.limited_by
    if total >= context.policy.maximum:
        return Bound.MAX
    return bounds.paced_by if total >= bounds.most else Bound.CAPACITY
