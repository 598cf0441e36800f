"""How much of a solution may be had at this instant: growth only into what nobody holds.

A device is free when the pod on it is gone, not when it was told to go: what shrinks goes first,
and growth is admitted as far as pods that hold devices now, draining ones included, leave room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlm_operator.autoscale.policy import VariantPolicy
from vlm_operator.autoscale.settling.goal import Case, Goal
from vlm_operator.autoscale.settling.solve import MICROS, Problem
from vlm_operator.names import Role


def admit(
    cases: Mapping[Role, Case],
    goals: Mapping[Role, Goal],
    wanted: Mapping[Role, Mapping[str, int]],
    problem: Problem,
) -> dict[Role, dict[str, int]]:
    """Grow only into devices that no pod holds at this instant."""
    found = {
        role: {name: min(count, cases[role].stock.standing[name]) for name, count in counts.items()}
        for role, counts in wanted.items()
    }
    for role, counts in found.items():
        _keep_least(cases[role], goals[role], counts, sum(wanted[role].values()))
    held = _Held(cases, problem)
    for pool in sorted(problem.pools, key=lambda item: -item.weight):
        counts = found[pool.role]
        for name, count in wanted[pool.role].items():
            while counts[name] < count and sum(counts.values()) < sum(wanted[pool.role].values()):
                grown = {**counts, name: counts[name] + 1}
                if not held.fits({**found, pool.role: grown}):
                    break
                counts[name] += 1
    return found


def _keep_least(case: Case, goal: Goal, counts: dict[str, int], total: int) -> None:
    """Give nothing up for another node type that would take a pool below its minimum meanwhile."""
    floor = min(total, case.before, goal.least if goal.held else max(case.policy.minimum, 0))
    for name, standing in case.stock.standing.items():
        added = max(0, min(floor - sum(counts.values()), standing - counts[name]))
        counts[name] += added


class _Held:
    """What all pools hold of the budget at the worst instant on the way to given replicas."""

    def __init__(self, cases: Mapping[Role, Case], problem: Problem) -> None:
        self._cases = cases
        self._limits = (problem.accelerators, problem.cost)

    def fits(self, targets: Mapping[Role, Mapping[str, int]]) -> bool:
        """Whether the budget holds throughout."""
        if self._limits == (None, None):
            return True
        accelerators, cost = 0, 0
        for role, target in targets.items():
            case = self._cases[role]
            for name, count in case.stock.held(target).items():
                devices, price = _footprint(case.policy.variants, name)
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
