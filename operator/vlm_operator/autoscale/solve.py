"""The integer program of allocation: replicas of each variant, over all pools of a service. Pure.

minimise   Σ price · N + start · (replicas beyond the current ones)
subject to Σ speed · N ≥ need                  each pool
           least ≤ N ≤ most                    each variant, and each pool's sum over its variants
           least ≤ N_i / N_j ≤ most            pool ratios
           Σ accelerators · N ≤ limit,  Σ cost · N ≤ limit

All numbers are integers: thousandths of a unit of capacity, millionths of the currency.

`solve` is exact. `fill` is greedy and is used if the program has no solution: it
ignores ratios and meets as much of these levels, in this order, as the budget allows:

1. the minimum of every pool        3. other current replicas
2. current replicas that are needed 4. the rest of the need

Within a level the pool with the largest weight x unmet need gets the next replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vlm_operator.autoscale.policy import Ratio
from vlm_operator.names import Role

Vector = tuple[int, ...]
MICROS = 1e6  # of the currency

# Replicas of one pool beyond its lower bound that are searched exactly. A pool that needs more gets
# the first ones greedily, by price per unit.
EXACT = 12


@dataclasses.dataclass(frozen=True)
class Choice:
    """One variant of one pool.

    Attributes:
        least, most: bounds on its replicas.
        current: its current replicas. Only replicas beyond them must start.
        speed: thousandths of a unit per replica.
        cost: cost of one replica per hour, as the budget counts it.
        price: cost of one replica per hour in the objective. It includes the risk of spot nodes. If
            a cost is unknown, it is equal for all variants.
        start: cost of one start-up in the objective, in the unit of `price`.
        preference: 0 to 100; the greater value wins among equal prices.
        overdue: current replicas that provide no capacity. They are removed first.
    """

    name: str
    least: int
    most: int
    current: int
    speed: int
    cost: int
    price: int
    start: int
    accelerators: int
    preference: int
    overdue: int = 0

    def units(self, count: int) -> int:
        """Capacity of `count` replicas, in thousandths of a unit."""
        serving = self.current - self.overdue
        return self.speed * (count - min(self.overdue, max(0, count - serving)))

    @property
    def price_per_unit(self) -> tuple[float, int, str]:
        """Sort key of an added replica: price per unit, then preference, then name."""
        return ((self.price + self.start) / max(self.speed, 1), -self.preference, self.name)


@dataclasses.dataclass(frozen=True)
class PoolProblem:
    """One pool.

    Attributes:
        need: thousandths of a unit.
        least, most: bounds on the sum of its replicas.
        floor: replicas of the first level of `fill`.
        weight: priority of the pool within a level of `fill`.
        core: thousandths of a unit of the second level of `fill`.
    """

    role: Role
    need: int
    least: int
    most: int
    floor: int
    weight: float
    choices: tuple[Choice, ...]
    core: int = 0

    def units(self, counts: Sequence[int]) -> int:
        """Capacity of a mix, in thousandths of a unit."""
        return sum(item.units(count) for item, count in zip(self.choices, counts, strict=True))


@dataclasses.dataclass(frozen=True)
class Problem:
    """All pools of a service. `accelerators` and `cost` are the budget; None is unlimited."""

    pools: tuple[PoolProblem, ...]
    ratios: tuple[Ratio, ...] = ()
    accelerators: int | None = None
    cost: int | None = None

    def affords(self, accelerators: int, cost: int) -> bool:
        """Whether the budget allows so many devices at this cost per hour."""
        return (self.accelerators is None or accelerators <= self.accelerators) and (
            self.cost is None or cost <= self.cost
        )

    def affords_counts(self, counts: Mapping[Role, Sequence[int]]) -> bool:
        """Whether the budget allows these replicas, given by pool in the order of its choices."""
        used = [
            (item.accelerators * count, item.cost * count)
            for pool in self.pools
            for item, count in zip(pool.choices, counts[pool.role], strict=True)
        ]
        return self.affords(sum(devices for devices, _ in used), sum(cost for _, cost in used))


class _Option(NamedTuple):
    """One mix of a pool. Its first three fields are the order in which `solve` prefers mixes."""

    price: int
    penalty: int  # of low preferences
    counts: Vector
    replicas: int
    accelerators: int
    cost: int


def solve(problem: Problem) -> dict[Role, Vector] | None:
    """Return the cheapest counts by pool, in the order of its choices; None if no counts fit.

    Ties: the greater preference wins, then the smaller counts of the first choices.
    The search is depth first over the pools, the cheapest mix first. A branch ends if it exceeds
    the budget or the best price even with the least that every later pool can add.
    """
    coupled = {role for ratio in problem.ratios for role in (ratio.numerator, ratio.denominator)}
    options = [_options(pool, coupled=pool.role in coupled) for pool in problem.pools]
    if not all(options):
        return None
    least = [
        (
            min(o.price for o in mixes),
            min(o.accelerators for o in mixes),
            min(o.cost for o in mixes),
        )
        for mixes in options
    ]
    best: tuple[int, int, tuple[Vector, ...]] | None = None

    def descend(chosen: tuple[_Option, ...]) -> None:
        nonlocal best
        used = [(option.price, option.accelerators, option.cost) for option in chosen]
        price, *limited = map(sum, zip((0, 0, 0), *used, *least[len(chosen) :], strict=True))
        if not problem.affords(*limited) or (best is not None and price > best[0]):
            return
        if len(chosen) < len(options):
            for option in options[len(chosen)]:
                descend((*chosen, option))
            return
        counts = tuple(option.counts for option in chosen)
        totals = {pool.role: sum(own) for pool, own in zip(problem.pools, counts, strict=True)}
        if all(holds(ratio, totals) for ratio in problem.ratios):
            found = price, sum(option.penalty for option in chosen), counts
            best = found if best is None else min(best, found)

    descend(())
    if best is None:
        return None
    return {pool.role: counts for pool, counts in zip(problem.pools, best[2], strict=True)}


def holds(ratio: Ratio, totals: Mapping[Role, int]) -> bool:
    """Whether the replicas of two pools satisfy a ratio; a pool at zero satisfies every ratio."""
    over, under = totals.get(ratio.numerator, 0), totals.get(ratio.denominator, 0)
    if over == 0 or under == 0:
        return True
    above = ratio.least is None or over >= ratio.least * under - 1e-9
    return above and (ratio.most is None or over <= ratio.most * under + 1e-9)


def _options(pool: PoolProblem, *, coupled: bool) -> list[_Option]:
    """The mixes of one pool that no cheaper mix dominates in all limits, the cheapest first.

    In a pool with a ratio (`coupled`) a mix dominates only mixes of as many replicas.
    """
    pool = _with_bulk(pool)
    kept: list[_Option] = []
    for option in sorted(_option(pool, counts) for counts in _mixes(pool, coupled=coupled)):
        if not any(
            other.accelerators <= option.accelerators
            and other.cost <= option.cost
            and (not coupled or other.replicas == option.replicas)
            for other in kept
        ):
            kept.append(option)
    return kept


def _option(pool: PoolProblem, counts: Vector) -> _Option:
    pairs = list(zip(pool.choices, counts, strict=True))
    return _Option(
        price=sum(c.price * count + c.start * max(0, count - c.current) for c, count in pairs),
        penalty=sum((100 - choice.preference) * count for choice, count in pairs),
        counts=counts,
        replicas=sum(counts),
        accelerators=sum(choice.accelerators * count for choice, count in pairs),
        cost=sum(choice.cost * count for choice, count in pairs),
    )


def _mixes(pool: PoolProblem, *, coupled: bool) -> Iterator[Vector]:
    """Every mix within the bounds that meets the need.

    Without ratios, mixes that meet the need with fewer replicas of one variant are left out: they
    are dominated.
    """
    least = tuple(item.least for item in pool.choices)
    most = min(pool.most, max(pool.least, sum(least)) + EXACT)

    def meets(counts: Vector) -> bool:
        return sum(counts) >= pool.least and pool.units(counts) >= pool.need

    def extend(chosen: Vector) -> Iterator[Vector]:
        index = len(chosen)
        if index == len(least):
            if meets(chosen):
                yield chosen
            return
        item, rest = pool.choices[index], least[index + 1 :]
        for count in range(item.least, min(item.most, most - sum(chosen) - sum(rest)) + 1):
            yield from extend((*chosen, count))
            if not coupled and meets((*chosen, count, *rest)):
                return

    return extend(())


def _with_bulk(pool: PoolProblem) -> PoolProblem:
    """Raise the lower bounds of a pool that needs more replicas than the exact search covers."""
    margin, counts = EXACT // 2, [item.least for item in pool.choices]
    slowest = min((item.speed for item in pool.choices), default=0)
    for index in sorted(range(len(counts)), key=lambda i: pool.choices[i].price_per_unit):
        while (
            counts[index] < pool.choices[index].most
            and sum(counts) < pool.most - margin
            and (
                pool.units(counts) < pool.need - margin * slowest
                or sum(counts) < pool.least - margin
            )
        ):
            counts[index] += 1
    if sum(counts) <= sum(item.least for item in pool.choices) + margin:
        return pool
    choices = tuple(
        dataclasses.replace(item, least=count)
        for item, count in zip(pool.choices, counts, strict=True)
    )
    return dataclasses.replace(pool, choices=choices)


class _Level(NamedTuple):
    """A level of `fill`: replicas and thousandths of a unit; `current_only` starts no replica."""

    replicas: int
    units: int
    current_only: bool


def fill(problem: Problem) -> dict[Role, Vector]:
    """Return counts within the budget that meet as much of each level as fits; see the module."""
    counts = {pool.role: [0] * len(pool.choices) for pool in problem.pools}
    for level in range(4):
        goals = {
            pool.role: (
                _Level(min(pool.floor, pool.most), 0, current_only=False),
                _Level(0, pool.core, current_only=True),
                _Level(pool.least, 0, current_only=True),
                _Level(min(pool.least, pool.most), pool.need, current_only=False),
            )[level]
            for pool in problem.pools
        }
        open_pools = list(problem.pools)
        while open_pools:
            gaps = [
                pool.weight * _gap(pool, goals[pool.role], counts[pool.role]) for pool in open_pools
            ]
            if max(gaps) <= 0:
                break
            pool = open_pools[gaps.index(max(gaps))]
            if not _add_replica(problem, pool, goals[pool.role], counts):
                open_pools.remove(pool)
    return {role: tuple(found) for role, found in counts.items()}


def _gap(pool: PoolProblem, goal: _Level, counts: Sequence[int]) -> float:
    """Replicas or units that the pool lacks to reach the level, whichever is more."""
    return max(goal.replicas - sum(counts), (goal.units - pool.units(counts)) / 1000)


def _add_replica(
    problem: Problem, pool: PoolProblem, goal: _Level, counts: Mapping[Role, list[int]]
) -> bool:
    """Add the best replica to `counts`: a current one before a new one, then by price per unit.

    Returns:
        False if no replica fits the bounds and the budget; `counts` is then unchanged.
    """
    own = counts[pool.role]
    useful = [
        (own[index] >= item.current, item.price_per_unit, index)
        for index, item in enumerate(pool.choices)
        if own[index] < (min(item.current, item.most) if goal.current_only else item.most)
        and (sum(own) < goal.replicas or item.units(own[index] + 1) > item.units(own[index]))
    ]
    for _, _, index in sorted(useful if sum(own) < pool.most else ()):
        own[index] += 1
        if problem.affords_counts(counts):
            return True
        own[index] -= 1
    return False
