"""All pools together: the cheapest mix that meets every goal, within ratios and the budget.

bounds ─▶ solve ─▶ grow for a ratio ─▶ drop ratios ─▶ split the budget ─▶ fit_devices ─▶ replicas
          exact    if solve found nothing             fill                at this instant

A device is free when the pod on it is gone, not when it was told to go: what shrinks goes first,
and growth is admitted as far as pods that hold devices now, draining ones included, leave room.
A pool stays at its minimum while another node type takes the place of what goes: pods on a node
stay for it first; those that wait in vain for one stay where growth has left the minimum unmet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vlm_operator.autoscale.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.capacity import startup_seconds
from vlm_operator.autoscale.outcome import Bound
from vlm_operator.autoscale.policy import Budget, VariantPolicy
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


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One pool's part of the solution.

    Attributes:
        variants: replicas now.
        wanted: replicas once devices are free.
        limited_by: what kept it from its need, None where it is met.
    """

    variants: Mapping[str, int]
    wanted: int
    limited_by: Bound | None

    @property
    def replicas(self) -> int:
        """All of them."""
        return sum(self.variants.values())


def allocate(
    contexts: Mapping[Role, PoolContext], bounds_by_role: Mapping[Role, ReplicaBounds]
) -> dict[Role, Allocation]:
    """Choose every pool's replicas by node type."""
    if not contexts:
        return {}
    service = next(iter(contexts.values())).service
    budget = service.budget
    reason = unreadable(contexts)
    if reason:
        bounds_by_role = {
            role: _frozen(contexts[role], bounds) for role, bounds in bounds_by_role.items()
        }
        budget = Budget()
    pools = tuple(_problem(contexts[role], bounds_by_role[role]) for role in contexts)
    problem = Problem(
        pools,
        service.pool_ratios,
        budget.accelerators,
        None if budget.cost_per_hour is None else math.floor(budget.cost_per_hour * MICROS + 0.5),
    )
    counts, bound = _solved(problem, contexts, bounds_by_role)
    wanted = {
        pool.role: dict(zip((item.name for item in pool.choices), counts[pool.role], strict=True))
        for pool in pools
    }
    _keep_waiting(contexts, bounds_by_role, wanted, problem)
    counts = {role: tuple(found.values()) for role, found in wanted.items()}
    admitted = fit_devices(contexts, bounds_by_role, wanted, problem)
    return {
        pool.role: Allocation(
            variants=admitted[pool.role],
            wanted=sum(wanted[pool.role].values()),
            limited_by=Bound.BUDGET_UNREADABLE
            if reason
            and pool.units(counts[pool.role]) < _thousandths(bounds_by_role[pool.role].need)
            else _limit(
                contexts[pool.role], bounds_by_role[pool.role], pool, counts[pool.role], bound
            ),
        )
        for pool in pools
    }


def unreadable(contexts: Mapping[Role, PoolContext]) -> str:
    """Why the budget cannot be kept, "" where it can or there is none."""
    service = next(iter(contexts.values())).service
    if service.budget.unreadable:
        return service.budget.unreadable
    if service.budget.cost_per_hour is None:
        return ""
    unknown = [
        f"{role}/{item.name}"
        for role, context in contexts.items()
        for item in context.policy.variants
        if item.cost_per_hour is None
    ]
    return f"nobody says what {', '.join(unknown)} costs" if unknown else ""


def _solved(
    problem: Problem,
    contexts: Mapping[Role, PoolContext],
    bounds_by_role: Mapping[Role, ReplicaBounds],
) -> tuple[dict[Role, Vector], Bound | None]:
    """The counts, and what had to be given up for them."""
    found = solve(problem)
    if found is not None:
        return found, None
    if problem.ratios:
        pools = tuple(
            _problem(contexts[pool.role], _widened(contexts[pool.role], bounds_by_role[pool.role]))
            for pool in problem.pools
        )
        found = solve(dataclasses.replace(problem, pools=pools))
        if found is not None:
            return found, Bound.POOL_RATIO
        found = solve(dataclasses.replace(problem, ratios=()))
        if found is not None:
            return found, Bound.POOL_RATIO
    return fill(problem), Bound.BUDGET


def _widened(context: PoolContext, bounds: ReplicaBounds) -> ReplicaBounds:
    """The same goal, with leave to grow for the sake of a ratio."""
    if bounds.spare <= 0 or context.before == 0:
        return bounds
    return dataclasses.replace(
        bounds, most=max(bounds.most, context.before + bounds.spare), upper=bounds.caps
    )


def _frozen(context: PoolContext, bounds: ReplicaBounds) -> ReplicaBounds:
    """The same goal without growth; what the manifest asks for at least is none."""
    if context.pool.replicas is None or bounds.most <= max(context.before, context.policy.minimum):
        return bounds
    standing = context.capacity.standing
    return dataclasses.replace(
        bounds,
        least=min(bounds.least, context.before),
        most=min(bounds.most, context.before),
        upper={name: max(standing[name], 0) for name in bounds.upper},
        lower={name: min(count, standing[name]) for name, count in bounds.lower.items()},
        spare=0,
    )


def _problem(context: PoolContext, bounds: ReplicaBounds) -> PoolProblem:
    """One pool in integers; its need no more than its own bounds can give."""
    constants, policy = context.service.constants, context.policy
    priced = all(item.cost_per_hour is not None for item in policy.variants)
    window = max(context.window, 1.0)  # a manifest may ask for none
    pool = PoolProblem(
        role=context.role,
        need=_thousandths(bounds.need),
        core=_thousandths(_core(context, bounds)),
        least=bounds.least,
        most=bounds.most,
        floor=min(bounds.least, max(policy.minimum, policy.replicas)),
        weight=WEIGHTS.get(context.role, 1.0) if policy.priority is None else policy.priority + 1.0,
        choices=tuple(
            _choice(
                item,
                least=bounds.lower[item.name],
                most=bounds.upper[item.name],
                standing=context.capacity.standing[item.name],
                overdue=context.capacity.overdue.get(item.name, 0),
                start=startup_seconds(context.role, item, context.estimate, constants) / window,
                priced=priced,
                risk=constants.spot_risk,
            )
            for item in policy.variants
        ),
    )
    reach = fill(Problem((pool,)))[pool.role]
    return dataclasses.replace(pool, need=min(pool.need, pool.units(reach)))


def _core(context: PoolContext, bounds: ReplicaBounds) -> float:
    """Units that are needed now, of those that the goal keeps."""
    need = context.need
    return bounds.need if need is None or bounds.held else min(need.units, bounds.need)


def _choice(
    item: VariantPolicy,
    *,
    least: int,
    most: int,
    standing: int,
    overdue: int,
    start: float,
    priced: bool,
    risk: float,
) -> Choice:
    cost = round((item.cost_per_hour or 0.0) * MICROS)
    price = round(cost * (1 + risk if item.spot else 1)) if priced else round(MICROS)
    return Choice(
        name=item.name,
        least=least,
        most=most,
        standing=standing,
        speed=max(1, round(item.speed * 1000)),
        cost=cost,
        price=price,
        start=round(price * start) if priced else 0,
        accelerators=item.accelerators,
        preference=item.preference,
        overdue=overdue,
    )


def _keep_waiting(
    contexts: Mapping[Role, PoolContext],
    bounds_by_role: Mapping[Role, ReplicaBounds],
    wanted: Mapping[Role, dict[str, int]],
    problem: Problem,
) -> None:
    """Let pods wait on for a node of an exhausted type, where nothing takes their place."""
    for role, counts in wanted.items():
        capacity = contexts[role].capacity
        for name, stuck in capacity.stuck.items():
            lost = min(stuck, capacity.standing[name] - counts[name])
            for _ in range(min(lost, bounds_by_role[role].least - sum(counts.values()))):
                counts[name] += 1
                if sum(counts.values()) <= contexts[role].policy.minimum:
                    _give_up_growth(contexts, role, wanted, problem)
                if not _affordable(problem, wanted):
                    counts[name] -= 1
                    break


def _give_up_growth(
    contexts: Mapping[Role, PoolContext],
    role: Role,
    wanted: Mapping[Role, dict[str, int]],
    problem: Problem,
) -> None:
    """Take growth from the other pools until the budget allows the minimum of this one."""
    for other, counts in wanted.items():
        context = contexts[other]
        floor = max(context.before, context.policy.minimum)
        for name, standing in context.capacity.standing.items():
            while (
                other is not role
                and counts[name] > standing
                and sum(counts.values()) > floor
                and not _affordable(problem, wanted)
            ):
                counts[name] -= 1


def _affordable(problem: Problem, wanted: Mapping[Role, Mapping[str, int]]) -> bool:
    """Whether the budget has room for all of it."""
    chosen = [
        (item, wanted[pool.role][item.name]) for pool in problem.pools for item in pool.choices
    ]
    accelerators = sum(item.accelerators * count for item, count in chosen)
    cost = sum(item.cost * count for item, count in chosen)
    return (problem.accelerators is None or accelerators <= problem.accelerators) and (
        problem.cost is None or cost <= problem.cost
    )


def _limit(
    context: PoolContext,
    bounds: ReplicaBounds,
    pool: PoolProblem,
    counts: Vector,
    bound: Bound | None,
) -> Bound | None:
    """What kept a pool from its goal."""
    total = sum(counts)
    if total < bounds.least or pool.units(counts) < pool.need:
        return bound or Bound.CAPACITY
    if bound is Bound.POOL_RATIO and total != context.before and bounds.most == context.before:
        return Bound.POOL_RATIO
    if pool.units(counts) >= _thousandths(bounds.need):
        return bounds.limited_by
    if total >= context.policy.maximum:
        return Bound.MAX
    return bounds.paced_by if total >= bounds.most else Bound.CAPACITY


def _thousandths(units: float) -> int:
    return math.ceil(min(units, 1e9) * 1000 - 1e-3)


def fit_devices(
    contexts: Mapping[Role, PoolContext],
    bounds_by_role: Mapping[Role, ReplicaBounds],
    wanted: Mapping[Role, Mapping[str, int]],
    problem: Problem,
) -> dict[Role, dict[str, int]]:
    """Grow only into devices that no pod holds at this instant."""
    found = {
        role: {
            name: min(count, contexts[role].capacity.standing[name])
            for name, count in counts.items()
        }
        for role, counts in wanted.items()
    }
    totals = {role: sum(counts.values()) for role, counts in wanted.items()}
    for role, counts in found.items():
        _keep_least(contexts[role], bounds_by_role[role], counts, totals[role], stuck=False)
    held = _Held(contexts, problem)
    for pool in sorted(problem.pools, key=lambda item: -item.weight):
        counts = found[pool.role]
        for name, count in wanted[pool.role].items():
            while counts[name] < count and sum(counts.values()) < totals[pool.role]:
                grown = {**counts, name: counts[name] + 1}
                if not held.fits({**found, pool.role: grown}):
                    break
                counts[name] += 1
        _keep_least(
            contexts[pool.role], bounds_by_role[pool.role], counts, totals[pool.role], stuck=True
        )
    return found


def _keep_least(
    context: PoolContext, bounds: ReplicaBounds, counts: dict[str, int], total: int, *, stuck: bool
) -> None:
    """Give nothing up for another node type that would take a pool below its minimum meanwhile.

    `stuck`: pods that wait in vain for a node stay for it, too.
    """
    floor = min(
        total, context.before, bounds.least if bounds.held else max(context.policy.minimum, 0)
    )
    for name, standing in context.capacity.standing.items():
        most = standing if stuck else standing - context.capacity.stuck.get(name, 0)
        added = max(0, min(floor - sum(counts.values()), most - counts[name]))
        counts[name] += added


class _Held:
    """What all pools hold of the budget at the worst instant on the way to given replicas."""

    def __init__(self, contexts: Mapping[Role, PoolContext], problem: Problem) -> None:
        self._cases = contexts
        self._limits = (problem.accelerators, problem.cost)

    def fits(self, targets: Mapping[Role, Mapping[str, int]]) -> bool:
        """Whether the budget holds throughout."""
        if self._limits == (None, None):
            return True
        accelerators, cost = 0, 0
        for role, target in targets.items():
            context = self._cases[role]
            for name, count in context.capacity.held(target).items():
                devices, price = _footprint(context.policy.variants, name)
                accelerators += devices * count
                cost += price * count
        most_accelerators, most_cost = self._limits
        return (most_accelerators is None or accelerators <= most_accelerators) and (
            most_cost is None or cost <= most_cost
        )


def _footprint(variants: Sequence[VariantPolicy], name: str) -> tuple[int, int]:
    """Devices and cost of one replica; of a variant that is no more, the most there is."""
    known = [item for item in variants if item.name == name] or list(variants)
    cost = max((item.cost_per_hour or 0.0 for item in known), default=0.0)
    return max((item.accelerators for item in known), default=0), round(cost * MICROS)
