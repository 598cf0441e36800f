"""Which node types, and how many of each: one small integer problem over all pools, exactly.

minimise   Σ price · N                         price: an hour, and of the start where N grows
subject to Σ speed · N ≥ need                  each pool
           least ≤ N ≤ most                    each node type, and their sum in each pool
           least ≤ N_i / N_j ≤ most            coupled pools
           Σ accelerators · N ≤ limit,  Σ cost · N ≤ limit

All numbers are integers: thousandths of a unit of capacity, millionths of the currency.

If nothing meets all of it, `fill` shares the budget, replica by replica, to whom it is most urgent:

1. every pool's minimum            3. what stands beyond the need
2. what stands and is needed       4. what is needed beyond that

Within a level the next replica goes to the pool with the greatest weight x unmet need: starting
work that cannot finish is waste, so decode weighs more than prefill, and prefill more than encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from vlm_operator.autoscale.policy import Ratio
from vlm_operator.names import Role

Vector = tuple[int, ...]
MICROS = 1e6  # of the currency

# Replicas of one pool that are chosen exactly; what a pool adds beyond them at once is taken by
# price per unit of capacity first.
EXACT = 12


@dataclasses.dataclass(frozen=True)
class Choice:
    """One node type of one pool.

    Attributes:
        least, most: replicas.
        standing: replicas that are there; only those beyond it have to start.
        overdue: of these, how many are no capacity; they are the first to go.
        speed: of one replica, in thousandths of a unit.
        cost: of one replica and hour, as a budget counts it.
        price: the same as choosing counts it: with the risk of spot, equal where nobody said.
        start: what a replica costs until it takes work, in terms of `price`.
        preference: 0 to 100; the greater wins among equal prices.
    """

    name: str
    least: int
    most: int
    standing: int
    speed: int
    cost: int
    price: int
    start: int
    accelerators: int
    preference: int
    overdue: int = 0

    def units(self, count: int) -> int:
        """Capacity of so many replicas, in thousandths."""
        return self.speed * (
            count - min(self.overdue, max(0, count - self.standing + self.overdue))
        )

    @property
    def rate(self) -> tuple[float, int, str]:
        """Price of a unit of capacity that is added; ties by preference, then by name."""
        return ((self.price + self.start) / max(self.speed, 1), -self.preference, self.name)

    def key(self, count: int) -> tuple[int, int]:
        """What `count` replicas are charged in choosing."""
        added = max(0, count - self.standing)
        return self.price * count + self.start * added, (100 - self.preference) * count


@dataclasses.dataclass(frozen=True)
class PoolProblem:
    """One pool: thousandths of units that it needs, and bounds on its replicas.

    Attributes:
        floor: replicas that come first when a budget does not suffice for all.
        core: thousandths of units that come next; the rest of `need` is held for caution.
        weight: whose unmet need goes first then.
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
        """Capacity of a mix, in thousandths."""
        return sum(item.units(count) for item, count in zip(self.choices, counts, strict=True))


@dataclasses.dataclass(frozen=True)
class Problem:
    """All pools of a service; None is no limit."""

    pools: tuple[PoolProblem, ...]
    ratios: tuple[Ratio, ...] = ()
    accelerators: int | None = None
    cost: int | None = None


@dataclasses.dataclass(frozen=True)
class _Option:
    key: tuple[int, int, Vector]
    counts: Vector
    total: int
    accelerators: int
    cost: int

    def beats(self, other: _Option, *, coupled: bool) -> bool:
        return (
            self.key <= other.key
            and self.accelerators <= other.accelerators
            and self.cost <= other.cost
            and (not coupled or self.total == other.total)
        )


def solve(problem: Problem) -> dict[Role, Vector] | None:
    """Return the cheapest counts, by pool and in the order of its choices; None where none fit.

    A tie goes to the greater preference, then to the lesser counts of the first choices.
    """
    apart = _solved(dataclasses.replace(problem, ratios=()), frozenset())
    if apart is None or not problem.ratios:
        return apart
    totals = {role: sum(counts) for role, counts in apart.items()}
    if all(holds(ratio, totals) for ratio in problem.ratios):
        return apart  # the best of all is the best of those that keep the ratios
    coupled = {role for ratio in problem.ratios for role in (ratio.numerator, ratio.denominator)}
    return _solved(problem, frozenset(coupled))


def _solved(problem: Problem, coupled: frozenset[Role]) -> dict[Role, Vector] | None:
    fronts = [_front(pool, coupled=pool.role in coupled) for pool in problem.pools]
    best = _Search(problem, fronts).run() if all(fronts) else None
    if best is None:
        return None
    return {pool.role: item.counts for pool, item in zip(problem.pools, best, strict=True)}


class _Search:
    """Depth first over pools, cheapest option first, cut off by what the rest costs at least."""

    def __init__(self, problem: Problem, fronts: Sequence[Sequence[_Option]]) -> None:
        self._problem = problem
        self._fronts = fronts
        self._best: tuple[tuple[int, int, tuple[Vector, ...]], list[_Option]] | None = None
        self._rest: list[tuple[int, int, int]] = [(0, 0, 0)]
        for front in reversed(fronts):
            price, accelerators, cost = self._rest[-1]
            self._rest.append(
                (
                    price + min(item.key[0] for item in front),
                    accelerators + min(item.accelerators for item in front),
                    cost + min(item.cost for item in front),
                )
            )
        self._rest.reverse()

    def run(self) -> list[_Option] | None:
        self._descend([], 0, 0, 0)
        return None if self._best is None else self._best[1]

    def _descend(self, chosen: list[_Option], price: int, accelerators: int, cost: int) -> None:
        depth = len(chosen)
        more_price, more_accelerators, more_cost = self._rest[depth]
        if not _within(self._problem.accelerators, accelerators + more_accelerators):
            return
        if not _within(self._problem.cost, cost + more_cost):
            return
        if self._best is not None and price + more_price > self._best[0][0]:
            return
        if depth == len(self._fronts):
            self._take(chosen, price)
            return
        for item in self._fronts[depth]:
            self._descend(
                [*chosen, item],
                price + item.key[0],
                accelerators + item.accelerators,
                cost + item.cost,
            )

    def _take(self, chosen: list[_Option], price: int) -> None:
        totals = {
            pool.role: item.total for pool, item in zip(self._problem.pools, chosen, strict=True)
        }
        if not all(holds(ratio, totals) for ratio in self._problem.ratios):
            return
        key = (price, sum(item.key[1] for item in chosen), tuple(item.counts for item in chosen))
        if self._best is None or key < self._best[0]:
            self._best = (key, chosen)


def holds(ratio: Ratio, totals: dict[Role, int]) -> bool:
    """Whether two pools' replicas are within a ratio; a pool at zero is bound by none."""
    over, under = totals.get(ratio.numerator, 0), totals.get(ratio.denominator, 0)
    if over == 0 or under == 0:
        return True
    above = ratio.least is None or over >= ratio.least * under - 1e-9
    return above and (ratio.most is None or over <= ratio.most * under + 1e-9)


def _within(limit: int | None, value: int) -> bool:
    return limit is None or value <= limit


def _front(pool: PoolProblem, *, coupled: bool) -> list[_Option]:
    """The mixes of one pool that nothing beats, the cheapest first."""
    pool = _with_bulk(pool)
    found = []
    for counts in _mixes(pool, coupled=coupled):
        keys = [item.key(count) for item, count in zip(pool.choices, counts, strict=True)]
        pairs = list(zip(pool.choices, counts, strict=True))
        found.append(
            _Option(
                key=(sum(a for a, _ in keys), sum(b for _, b in keys), counts),
                counts=counts,
                total=sum(counts),
                accelerators=sum(item.accelerators * count for item, count in pairs),
                cost=sum(item.cost * count for item, count in pairs),
            )
        )
    front: list[_Option] = []
    for option in sorted(found, key=lambda item: item.key):
        if not any(other.beats(option, coupled=coupled) for other in front):
            front.append(option)
    return front


def _mixes(pool: PoolProblem, *, coupled: bool) -> Iterator[Vector]:
    """Every mix within the bounds that meets the need; without ratios none with one too many."""
    base = [item.least for item in pool.choices]
    most = min(pool.most, max(pool.least, sum(base)) + EXACT)

    def extend(index: int, counts: list[int], total: int, units: int) -> Iterator[Vector]:
        if total > most:
            return
        enough = units >= pool.need and total >= pool.least
        if index == len(base):
            if enough:
                yield tuple(counts)
            return
        item = pool.choices[index]
        top = item.most if coupled or not enough else item.least
        for count in range(item.least, min(top, item.least + most - total) + 1):
            added, gained = count - item.least, item.units(count) - item.units(item.least)
            counts[index] = count
            yield from extend(index + 1, counts, total + added, units + gained)
            met = units + gained >= pool.need and total + added >= pool.least
            if met and not coupled:
                break
        counts[index] = item.least

    if all(item.least <= item.most for item in pool.choices):
        yield from extend(0, list(base), sum(base), pool.units(base))


def _with_bulk(pool: PoolProblem) -> PoolProblem:
    """Raise the least counts of a pool that needs many more than can be chosen exactly."""
    counts = {item.name: item.least for item in pool.choices}
    units, total = pool.units(tuple(counts.values())), sum(counts.values())
    slowest = min((item.speed for item in pool.choices), default=0)
    spare = EXACT // 2
    for item in sorted(pool.choices, key=lambda choice: choice.rate):
        while counts[item.name] < item.most and total < pool.most - spare:
            if units >= pool.need - spare * slowest and total >= pool.least - spare:
                break
            units -= item.units(counts[item.name])
            counts[item.name] += 1
            units, total = units + item.units(counts[item.name]), total + 1
    if total <= sum(item.least for item in pool.choices) + spare:
        return pool  # little enough to be exact
    choices = tuple(dataclasses.replace(item, least=counts[item.name]) for item in pool.choices)
    return dataclasses.replace(pool, choices=choices)


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
