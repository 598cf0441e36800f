"""Decides the number of replicas of each pool in this turn, with its inputs. Pure.

service, node classes ─▶ policy ┐
observed ─────────────▶ view    ├─▶ decide ─▶ outcome        together: a record for replay
memory of the last turn ────────┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from vlm_operator.api import ScalingMode, VLMService
from vlm_operator.autoscale.constants import CONSTANTS, Constants
from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.inputs import service_policy, service_view
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy, VariantPolicy
from vlm_operator.autoscale.view import View
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.state import Observed


@dataclasses.dataclass(frozen=True)
class Sizing:
    """One tick of the autoscaler: policy, view and memory as input, and its outcome."""

    policy: ServicePolicy
    view: View
    before: Memory
    outcome: Outcome


def size_pools(
    service: VLMService,
    observed: Observed,
    memory: Memory,
    *,
    current: Iterable[tuple[Role, str]],
    rolling: Collection[Role],
    constants: Constants = CONSTANTS,
) -> Sizing:
    """Decide the size of every pool.

    Args:
        service: the service with its defaults and node classes filled in.
        observed: view of this turn.
        memory: the autoscaler's memory after the last turn.
        current: roles with the revisions that the rollout goes to.
        rolling: roles that still have pods of other revisions.
        constants: constants of the autoscaling method.

    Raises:
        SpecError: the pools' minimum replicas exceed the budget.
    """
    policy = service_policy(service, observed.node_classes, constants=constants)
    if not service.spec.stopped:
        _check_budget(policy)
    view = service_view(service, observed, observed.deployments(), current=current, rolling=rolling)
    return Sizing(policy, view, memory, decide(policy, view, memory))


def _check_budget(policy: ServicePolicy) -> None:
    budget = policy.budget
    if budget.accelerators is not None:
        least = _least(policy, lambda item: float(item.accelerators))
        if least > budget.accelerators:
            raise SpecError(
                "spec.budget.maxAccelerators",
                f"{budget.accelerators} is less than the {least:g} that the pools' least replicas "
                "hold: raise it, or lower minReplicas",
            )
    if budget.cost_per_hour is not None and not budget.unreadable:
        least = _least(policy, lambda item: item.cost_per_hour or 0.0)
        if least > budget.cost_per_hour + 1e-9:
            raise SpecError(
                "spec.budget.maxCostPerHour",
                f"{budget.cost_per_hour:g} is less than the {least:g} that the pools' least "
                "replicas cost: raise it, or lower minReplicas",
            )


def _least(policy: ServicePolicy, price: Callable[[VariantPolicy], float]) -> float:
    """Return the least total price of all pools at their minimum, on their cheapest variants."""
    return sum(_least_of(pool, price) for pool in policy.pools.values())


def _least_of(pool: PoolPolicy, price: Callable[[VariantPolicy], float]) -> float:
    missing = pool.replicas if pool.mode is ScalingMode.MANUAL else pool.minimum
    total = 0.0
    for item in sorted(pool.variants, key=price):
        count = missing if item.max_replicas is None else min(missing, item.max_replicas)
        total += count * price(item)
        missing -= count
    return total
