"""All pools together: the cheapest mix that meets every goal, within ratios and the budget.

goals ─▶ solve ─▶ grow for a ratio's sake ─▶ let ratios go ─▶ share the budget ─▶ admit ─▶ replicas
          exact    where solve found nothing                   fill               at this instant
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.policy import Budget, VariantPolicy
from vlm_operator.autoscale.reasons import Bound
from vlm_operator.autoscale.settling.admit import admit
from vlm_operator.autoscale.settling.fill import fill
from vlm_operator.autoscale.settling.goal import Case, Goal
from vlm_operator.autoscale.settling.solve import (
    MICROS,
    Choice,
    PoolProblem,
    Problem,
    Vector,
    solve,
)
from vlm_operator.autoscale.settling.stock import startup_seconds
from vlm_operator.names import Role

WEIGHTS = {Role.DECODE: 3.0, Role.PREFILL: 2.0, Role.ENCODER: 1.0}


@dataclasses.dataclass(frozen=True)
class Share:
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


def couple(cases: Mapping[Role, Case], goals: Mapping[Role, Goal]) -> dict[Role, Share]:
    """Choose every pool's replicas by node type."""
    if not cases:
        return {}
    service = next(iter(cases.values())).service
    budget = service.budget
    reason = unreadable(cases)
    if reason:
        goals = {role: _frozen(cases[role], goal) for role, goal in goals.items()}
        budget = Budget()
    pools = tuple(_problem(cases[role], goals[role]) for role in cases)
    problem = Problem(
        pools,
        service.coupling,
        budget.accelerators,
        None if budget.cost_per_hour is None else math.floor(budget.cost_per_hour * MICROS + 0.5),
    )
    counts, bound = _solved(problem, cases, goals)
    wanted = {
        pool.role: dict(zip((item.name for item in pool.choices), counts[pool.role], strict=True))
        for pool in pools
    }
    _keep_waiting(cases, goals, wanted, problem)
    counts = {role: tuple(found.values()) for role, found in wanted.items()}
    admitted = admit(cases, goals, wanted, problem)
    return {
        pool.role: Share(
            variants=admitted[pool.role],
            wanted=sum(wanted[pool.role].values()),
            limited_by=Bound.BUDGET_UNREADABLE
            if reason and pool.units(counts[pool.role]) < _thousandths(goals[pool.role].need)
            else _limit(cases[pool.role], goals[pool.role], pool, counts[pool.role], bound),
        )
        for pool in pools
    }


def unreadable(cases: Mapping[Role, Case]) -> str:
    """Why the budget cannot be kept, "" where it can or there is none."""
    service = next(iter(cases.values())).service
    if service.budget.unreadable:
        return service.budget.unreadable
    if service.budget.cost_per_hour is None:
        return ""
    unknown = [
        f"{role}/{item.name}"
        for role, case in cases.items()
        for item in case.policy.variants
        if item.cost_per_hour is None
    ]
    return f"nobody says what {', '.join(unknown)} costs" if unknown else ""


def _solved(
    problem: Problem, cases: Mapping[Role, Case], goals: Mapping[Role, Goal]
) -> tuple[dict[Role, Vector], Bound | None]:
    """The counts, and what had to be given up for them."""
    found = solve(problem)
    if found is not None:
        return found, None
    if problem.ratios:
        pools = tuple(
            _problem(cases[pool.role], _widened(cases[pool.role], goals[pool.role]))
            for pool in problem.pools
        )
        found = solve(dataclasses.replace(problem, pools=pools))
        if found is not None:
            return found, Bound.COUPLING
        found = solve(dataclasses.replace(problem, ratios=()))
        if found is not None:
            return found, Bound.COUPLING
    return fill(problem), Bound.BUDGET


def _widened(case: Case, goal: Goal) -> Goal:
    """The same goal, with leave to grow for the sake of a ratio."""
    if goal.spare <= 0 or case.before == 0:
        return goal
    return dataclasses.replace(goal, most=max(goal.most, case.before + goal.spare), upper=goal.caps)


def _frozen(case: Case, goal: Goal) -> Goal:
    """The same goal without growth; what the manifest asks for at least is none."""
    if case.pool.replicas is None or goal.most <= max(case.before, case.policy.minimum):
        return goal
    standing = case.stock.standing
    return dataclasses.replace(
        goal,
        least=min(goal.least, case.before),
        most=min(goal.most, case.before),
        upper={name: max(standing[name], 0) for name in goal.upper},
        lower={name: min(count, standing[name]) for name, count in goal.lower.items()},
        spare=0,
    )


def _problem(case: Case, goal: Goal) -> PoolProblem:
    """One pool in integers; its need no more than its own bounds can give."""
    tuning, policy = case.service.tuning, case.policy
    priced = all(item.cost_per_hour is not None for item in policy.variants)
    window = max(case.window, 1.0)  # a manifest may ask for none
    pool = PoolProblem(
        role=case.role,
        need=_thousandths(goal.need),
        core=_thousandths(_core(case, goal)),
        least=goal.least,
        most=goal.most,
        floor=min(goal.least, max(policy.minimum, policy.replicas)),
        weight=WEIGHTS.get(case.role, 1.0) if policy.priority is None else policy.priority + 1.0,
        choices=tuple(
            _choice(
                item,
                least=goal.lower[item.name],
                most=goal.upper[item.name],
                standing=case.stock.standing[item.name],
                overdue=case.stock.overdue.get(item.name, 0),
                start=startup_seconds(case.role, item, case.estimate, tuning) / window,
                priced=priced,
                risk=tuning.spot_risk,
            )
            for item in policy.variants
        ),
    )
    reach = fill(Problem((pool,)))[pool.role]
    return dataclasses.replace(pool, need=min(pool.need, pool.units(reach)))


def _core(case: Case, goal: Goal) -> float:
    """Units that are needed now, of those that the goal keeps."""
    need = case.need
    return goal.need if need is None or goal.held else min(need.units, goal.need)


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
    cases: Mapping[Role, Case],
    goals: Mapping[Role, Goal],
    wanted: Mapping[Role, dict[str, int]],
    problem: Problem,
) -> None:
    """Let pods wait on for a node of an exhausted type, where nothing takes their place."""
    for role, counts in wanted.items():
        stock = cases[role].stock
        for name, stuck in stock.stuck.items():
            lost = min(stuck, stock.standing[name] - counts[name])
            for _ in range(min(lost, goals[role].least - sum(counts.values()))):
                counts[name] += 1
                if not _affordable(problem, wanted):
                    counts[name] -= 1
                    break


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
    case: Case, goal: Goal, pool: PoolProblem, counts: Vector, bound: Bound | None
) -> Bound | None:
    """What kept a pool from its goal."""
    total = sum(counts)
    if total < goal.least or pool.units(counts) < pool.need:
        return bound or Bound.CAPACITY
    if bound is Bound.COUPLING and total != case.before and goal.most == case.before:
        return Bound.COUPLING
    if pool.units(counts) >= _thousandths(goal.need):
        return goal.limited_by
    if total >= case.policy.maximum:
        return Bound.MAX
    return goal.paced_by if total >= goal.most else Bound.CAPACITY


def _thousandths(units: float) -> int:
    return math.ceil(min(units, 1e9) * 1000 - 1e-3)
