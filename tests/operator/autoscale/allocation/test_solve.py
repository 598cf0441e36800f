"""The small integer problem over all pools: equal to brute force, and what it does without one."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_operator.autoscale.policy import Ratio
from vlm_operator.autoscale.solve import Choice, PoolProblem, Problem, fill, holds, solve
from vlm_operator.names import POOL_ROLES, Role


def choice(name="a", **changes) -> Choice:
    plain = Choice(
        name=name,
        least=0,
        most=6,
        current=0,
        speed=1000,
        cost=10,
        price=10,
        start=0,
        accelerators=1,
        preference=0,
    )
    return dataclasses.replace(plain, **changes)


def pool(*choices: Choice, role=Role.DECODE, need=0, least=0, most=8, **changes) -> PoolProblem:
    return PoolProblem(role, need, least, most, changes.get("floor", 0), 1.0, choices)


@st.composite
def choices(draw, name: str) -> Choice:
    least = draw(st.integers(0, 2))
    cost = draw(st.integers(0, 40))
    standing = draw(st.integers(0, 3))
    return Choice(
        name=name,
        least=least,
        most=draw(st.integers(least, 3)),
        current=standing,
        overdue=draw(st.integers(0, standing)),
        speed=draw(st.sampled_from([250, 500, 1000, 1700, 3000])),
        cost=cost,
        price=cost + draw(st.integers(0, 4)),
        start=draw(st.integers(0, 20)),
        accelerators=draw(st.integers(0, 4)),
        preference=draw(st.integers(0, 100)),
    )


@st.composite
def problems(draw) -> Problem:
    roles = POOL_ROLES[: draw(st.integers(1, 3))]
    most_choices = 3 if len(roles) < 3 else 2
    pools = []
    for role in roles:
        found = [draw(choices(name)) for name in "abcd"[: draw(st.integers(1, most_choices))]]
        least = draw(st.integers(0, 3))
        pools.append(
            pool(
                *found,
                role=role,
                need=draw(st.integers(0, 6000)),
                least=least,
                most=draw(st.integers(least, 8)),
            )
        )
    shares = st.one_of(st.none(), st.sampled_from([0.25, 0.5, 1.0, 2.0]))
    ratios = ()
    if len(roles) > 1 and draw(st.booleans()):
        ratios = (Ratio(roles[0], roles[1], draw(shares), draw(shares)),)
    limit = st.one_of(st.none(), st.integers(0, 25))
    money = st.one_of(st.none(), st.integers(0, 300))
    return Problem(tuple(pools), ratios, draw(limit), draw(money))


def charge(problem: Problem, counts) -> tuple | None:
    """What an assignment costs in choosing, None where it breaks a rule."""
    totals, price, ties, accelerators, cost = {}, 0, 0, 0, 0
    for item, vector in zip(problem.pools, counts, strict=True):
        totals[item.role] = sum(vector)
        if not item.least <= sum(vector) <= item.most or item.units(vector) < item.need:
            return None
        for option, count in zip(item.choices, vector, strict=True):
            price += option.price * count + option.start * max(0, count - option.current)
            ties += (100 - option.preference) * count
            accelerators += option.accelerators * count
            cost += option.cost * count
    if problem.accelerators is not None and accelerators > problem.accelerators:
        return None
    if problem.cost is not None and cost > problem.cost:
        return None
    if not all(holds(ratio, totals) for ratio in problem.ratios):
        return None
    return price, ties, tuple(counts)


def brute_force(problem: Problem) -> tuple | None:
    mixes = [
        list(itertools.product(*(range(item.least, item.most + 1) for item in pool_.choices)))
        for pool_ in problem.pools
    ]
    found = [charge(problem, counts) for counts in itertools.product(*mixes)]
    return min((item for item in found if item is not None), default=None)


def equals_brute_force(problem: Problem) -> None:
    best, found = brute_force(problem), solve(problem)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert charge(problem, [found[item.role] for item in problem.pools]) == best


@given(problems())
@settings(max_examples=150)
def test_the_solver_equals_brute_force(problem):
    equals_brute_force(problem)


@pytest.mark.full
@pytest.mark.timeout(3600)
@given(problems())
@settings(max_examples=20_000)
def test_the_solver_equals_brute_force_at_length(problem):
    equals_brute_force(problem)


@given(problems())
@settings(max_examples=200)
def test_a_shared_budget_is_kept_and_what_fits_is_not_left_unused(problem):
    found = fill(problem)
    accelerators = cost = 0
    for item in problem.pools:
        for option, count in zip(item.choices, found[item.role], strict=True):
            assert 0 <= count <= max(option.most, 0)
            accelerators += option.accelerators * count
            cost += option.cost * count
        assert sum(found[item.role]) <= item.most
    assert problem.accelerators is None or accelerators <= problem.accelerators
    assert problem.cost is None or cost <= problem.cost
    for item in problem.pools:
        counts = found[item.role]
        if item.units(counts) >= item.need or sum(counts) >= item.most:
            continue
        for option, count in zip(item.choices, counts, strict=True):
            fits = (
                problem.accelerators is None
                or accelerators + option.accelerators <= problem.accelerators
            ) and (problem.cost is None or cost + option.cost <= problem.cost)
            helps = option.units(count + 1) > option.units(count)
            assert count >= option.most or not fits or not helps


def test_cheap_capacity_comes_first_and_a_tie_goes_to_the_preferred_type():
    cheap, dear = choice("a", cost=30, price=30), choice("b", speed=4000, cost=100, price=100)
    problem = Problem((pool(cheap, dear, need=5000),))
    assert solve(problem) == {Role.DECODE: (1, 1)}
    same = Problem((pool(choice("a"), choice("b", preference=10), need=2000),))
    assert solve(same) == {Role.DECODE: (0, 2)}


def test_what_stands_is_kept_where_starting_another_costs_more_than_it_saves():
    standing, other = choice("a", price=11, current=2), choice("b", start=5)
    assert solve(Problem((pool(standing, other, need=2000),))) == {Role.DECODE: (2, 0)}
    other = dataclasses.replace(other, start=0)
    assert solve(Problem((pool(standing, other, need=2000),))) == {Role.DECODE: (0, 2)}


def test_under_a_budget_decode_comes_before_prefill_and_both_have_their_minimum():
    def one(role, weight):
        found = pool(choice(most=20), role=role, need=8000, least=1, most=20, floor=1)
        return dataclasses.replace(found, weight=weight)

    pools = one(Role.PREFILL, 2.0), one(Role.DECODE, 3.0)
    found = fill(Problem(pools, accelerators=6))
    assert found[Role.PREFILL] == (2,)
    assert found[Role.DECODE] == (4,)
    assert fill(Problem(pools, accelerators=2)) == {Role.PREFILL: (1,), Role.DECODE: (1,)}


def test_many_at_once_are_taken_by_their_price_and_the_last_ones_exactly():
    slow = choice("a", most=1000, speed=1000, cost=10, price=10)
    fast = choice("b", most=1000, speed=3500, cost=34, price=34)
    found = solve(Problem((pool(slow, fast, need=700_000, most=1000),)))
    assert found is not None
    counts = found[Role.DECODE]
    assert pool(slow, fast).units(counts) >= 700_000
    assert 10 * counts[0] + 34 * counts[1] <= 34 * 200 + 34
