"""Services that nobody wrote: pools, node types, budgets and ratios by chance."""

import dataclasses
import random

from support.sizing import World, pool, service, variant
from vlm_operator import names
from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import MissingMetrics, WhileAtZero
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.policy import Budget, Ratio, ServicePolicy, ZeroPolicy
from vlm_operator.names import POOL_ROLES, Role

OURS = names.MANAGER_AUTOSCALER  # a number of another writer has precedence over all signals
# Windows of a minute, so that a few hundred ticks see every rule at work.
QUICK = Constants(
    exhausted_seconds=60, missing_seconds=30,
)  # fmt: skip


def made_up_policy(rng: random.Random) -> ServicePolicy:
    """One to three pools of one to three node types, with or without budget and ratio."""
    roles = POOL_ROLES[3 - rng.randint(1, 3) :]
    pools, floor_devices, floor_cost = [], 0, 0.0
    for role in roles:
        found = tuple(
            variant(
                name,
                cost_per_hour=rng.choice([0.5, 1.0, 2.5]),
                accelerators=rng.randint(0, 2),
                speed=rng.choice([0.5, 1.0, 2.0]),
                spot=rng.random() < 0.3,
                preference=rng.randint(0, 100),
                startup_seconds=rng.choice([None, 5.0, 30.0]),
                max_replicas=rng.choice([None, None, 3]),
            )
            for name in "abc"[: rng.randint(1, 3)]
        )
        found = (dataclasses.replace(found[0], max_replicas=None), *found[1:])
        zero = role is Role.ENCODER and rng.random() < 0.4
        minimum = 0 if zero else rng.randint(1, 2)
        pools.append(
            pool(
                role,
                *found,
                minimum=minimum,
                maximum=minimum + rng.randint(1, 8),
                mode=ScalingMode.EXTERNAL if rng.random() < 0.2 else ScalingMode.AUTO,
                up_pods=rng.randint(1, 4),
                up_seconds=rng.choice([0.0, 0.0, 15.0]),
                down_pods=rng.randint(1, 2),
                down_seconds=rng.choice([30.0, 60.0]),
                zero=ZeroPolicy(30.0, WhileAtZero.QUEUE) if zero else None,
            )
        )
        floor_devices += minimum * found[0].accelerators
        floor_cost += minimum * (found[0].cost_per_hour or 0.0)
    budget = Budget(
        rng.choice([None, floor_devices + rng.randint(0, 8)]),
        rng.choice([None, floor_cost + rng.random() * 8]),
    )
    ratio = Ratio(roles[0], roles[-1], rng.choice([None, 0.5]), rng.choice([None, 2.0]))
    return service(
        *pools,
        budget=budget,
        pool_ratios=(ratio,) if len(roles) > 1 and rng.random() < 0.4 else (),
        missing=rng.choice(list(MissingMetrics)),
        fallback={role: rng.randint(0, 12) for role in roles},
        constants=QUICK,
        itl_seconds=rng.choice([None, 0.1]),
    )


def start_of(policy: ServicePolicy) -> dict[Role, dict[str, int]]:
    return {
        role: {item.variants[0].name: max(item.minimum, 0)} for role, item in policy.pools.items()
    }


def within_budget(world: World) -> None:
    budget = world.policy.budget
    assert budget.accelerators is None or world.accelerators() <= budget.accelerators
    assert budget.cost_per_hour is None or world.cost() <= budget.cost_per_hour + 1e-6
