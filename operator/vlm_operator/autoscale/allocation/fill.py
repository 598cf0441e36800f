"""Sharing a budget that does not suffice: replica by replica, to whom it is most urgent.

1. every pool's minimum            3. what stands beyond the need
2. what stands and is needed       4. what is needed beyond that

Within a level the next replica goes to the pool with the greatest weight x unmet need: starting
work that cannot finish is waste, so decode weighs more than prefill, and prefill more than encoder.
"""

from __future__ import annotations

import dataclasses

from vlm_operator.autoscale.allocation.solve import Choice, PoolProblem, Problem, Vector
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class _Level:
    """Replicas and thousandths of units to reach, from standing replicas alone or not."""

    replicas: int
    units: int
    standing_only: bool


def fill(problem: Problem) -> dict[Role, Vector]:
    """Return counts within the limits that meet as much of the needs as fits; ratios are let go."""
    filled = _Filled(problem)
    for level in range(4):
        filled.reach({pool.role: _levels(pool)[level] for pool in problem.pools})
    return {pool.role: tuple(filled.counts[pool.role]) for pool in problem.pools}


def _levels(pool: PoolProblem) -> tuple[_Level, ...]:
    return (
        _Level(min(pool.floor, pool.most), 0, standing_only=False),
        _Level(0, pool.core, standing_only=True),
        _Level(pool.least, 0, standing_only=True),
        _Level(min(pool.least, pool.most), pool.need, standing_only=False),
    )


class _Filled:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.counts = {pool.role: [0] * len(pool.choices) for pool in problem.pools}
        self._accelerators = 0
        self._cost = 0

    def reach(self, levels: dict[Role, _Level]) -> None:
        """Add replicas until every pool is at its level, or nothing more fits."""
        open_pools = list(self._problem.pools)
        while open_pools:
            gaps = [
                (self._unmet(pool, levels[pool.role]) * pool.weight, pool) for pool in open_pools
            ]
            gap, pool = max(gaps, key=lambda item: item[0])
            if gap <= 0:
                return
            index = self._best(pool, levels[pool.role])
            if index is None:
                open_pools.remove(pool)
                continue
            choice = pool.choices[index]
            self.counts[pool.role][index] += 1
            self._accelerators += choice.accelerators
            self._cost += choice.cost

    def _unmet(self, pool: PoolProblem, level: _Level) -> float:
        counts = self.counts[pool.role]
        return max(level.replicas - sum(counts), (level.units - pool.units(counts)) / 1000)

    def _best(self, pool: PoolProblem, level: _Level) -> int | None:
        """The next replica: one that stands before one that must start, then the best price."""
        counts = self.counts[pool.role]
        if sum(counts) >= pool.most:
            return None
        fitting = [
            (count >= item.standing, item.rate, index)
            for index, (item, count) in enumerate(zip(pool.choices, counts, strict=True))
            if count < (min(item.standing, item.most) if level.standing_only else item.most)
            and (sum(counts) < level.replicas or item.units(count + 1) > item.units(count))
            and self._fits(item)
        ]
        return min(fitting)[2] if fitting else None

    def _fits(self, item: Choice) -> bool:
        accelerators, cost = self._problem.accelerators, self._problem.cost
        return (
            accelerators is None or self._accelerators + item.accelerators <= accelerators
        ) and (cost is None or self._cost + item.cost <= cost)
