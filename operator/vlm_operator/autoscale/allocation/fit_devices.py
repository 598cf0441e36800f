"""Limits growth to the devices that are free at this moment.

A device is free when the pod on it is gone, not when it was told to go: what shrinks goes first,
and growth is admitted as far as pods that hold devices now, draining ones included, leave room.

A pool stays at its minimum while another node type takes the place of what goes: pods on a node
stay for it first; those that wait in vain for one stay where growth has left the minimum unmet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlm_operator.autoscale.allocation.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.allocation.solve import MICROS, Problem
from vlm_operator.autoscale.policy import VariantPolicy
from vlm_operator.names import Role


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
