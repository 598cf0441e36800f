"""Plans the next step of a rollout from one view of a service. Pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from vlm_operator.api import VLMService, quantity, stages
from vlm_operator.api.enums import NoSpareCapacity
from vlm_operator.api.pool import PoolRollout
from vlm_operator.names import Role
from vlm_operator.rollout.replica_counts import BudgetUse, SurgeLimits, within_budget
from vlm_operator.rollout.steps import Step, next_step
from vlm_operator.rollout.target import RolloutTarget, select_target, sizes
from vlm_operator.state import DeploymentState, Observed, Revision


def choose_rollout_target(
    service: VLMService,
    observed: Observed,
    revisions: Mapping[tuple[Role, str], Revision],
    *,
    unschedulable_timeout: float,
    progressed: float,
) -> RolloutTarget:
    """Choose the revisions that the rollout goes to.

    Arguments are as in `plan_rollout`. `progressed` is when the service last made progress, in
    seconds since the epoch.
    """
    loads = {
        role: frozenset(stage.value for stage in stages(service.spec.pools, role))
        for role in service.spec.pools.present
    }
    return select_target(
        revisions,
        loads,
        observed.deployments(),
        observed.pods,
        service.spec.rollout,
        unschedulable_timeout=unschedulable_timeout,
        progressed=progressed,
        now=observed.now,
    )


def plan_rollout(
    service: VLMService,
    observed: Observed,
    rollout_target: RolloutTarget,
    target: Mapping[tuple[Role, str], int],
    *,
    unschedulable_timeout: float,
) -> Step:
    """Decide the next step.

    Args:
        service: the service with its defaults filled in.
        observed: view of this turn.
        rollout_target: result of `choose_rollout_target`.
        target: final number of replicas, by role and variant.
        unschedulable_timeout: seconds that a surge pod may wait for a node.
    """
    live = observed.deployments()
    front = 0 if service.spec.stopped else service.spec.gateway.replicas
    whole = sizes(rollout_target.goals, {**target, (Role.GATEWAY, ""): front}, live)
    gateways = collections.Counter(
        pod.compat for pod in observed.pods if pod.role is Role.GATEWAY and not pod.finished
    )
    limits_by_role = _surge_limits(service, observed, rollout_target, whole, unschedulable_timeout)
    step = next_step(
        rollout_target, whole, live, gateways, limits_by_role, service.spec.rollout.strategy
    )
    tight = [
        role for role, limits in limits_by_role.items() if limits.surge == 0 == limits.unavailable
    ]
    if step.done or not tight:
        return step
    reason = f"{step.waiting}; spec.budget has no room for one more {tight[0]} pod"
    return dataclasses.replace(step, waiting=reason, over_budget=True)


def rolling(rollout_target: RolloutTarget, own: Sequence[DeploymentState]) -> bool:
    """Whether pods of other revisions than the goals' still exist."""
    goals = {(*key, goal.revision) for key, goal in rollout_target.goals.items()}
    return any(
        item.desired + item.replicas > 0
        for item in own
        if (item.role, item.variant, item.revision) not in goals
    )


def _surge_limits(
    service: VLMService,
    observed: Observed,
    rollout_target: RolloutTarget,
    whole: Mapping[tuple[Role, str], int],
    unschedulable_timeout: float,
) -> dict[Role, SurgeLimits]:
    """Return surge and unavailability by role, limited by pool settings, budget and full nodes."""
    found = {}
    for role in {name for name, _ in whole} - {Role.GATEWAY}:
        pool = service.spec.pools.of(role)
        count = sum(number for (name, _), number in whole.items() if name is role)
        found[role] = SurgeLimits.of(PoolRollout() if pool is None else pool.rollout, count)
    limits_by_role = within_budget(found, _budget_uses(service, observed, whole))
    chosen = service.spec.rollout.when_no_spare_capacity
    if chosen is NoSpareCapacity.WAIT:
        return limits_by_role
    goals = {(*key, goal.revision) for key, goal in rollout_target.goals.items()}
    stuck = {
        role for role, limits in limits_by_role.items() if limits.surge == 0 == limits.unavailable
    } | {
        pod.role
        for pod in observed.pods
        if pod.pending
        and (pod.role, pod.variant, pod.revision) in goals
        and observed.now - pod.created > unschedulable_timeout
    }
    last_too = chosen is NoSpareCapacity.DRAIN_FIRST
    return {
        role: dataclasses.replace(limits, drain_first=role in stuck, last_too=last_too)
        for role, limits in limits_by_role.items()
    }


def _budget_uses(
    service: VLMService, observed: Observed, whole: Mapping[tuple[Role, str], int]
) -> Iterator[BudgetUse]:
    """Yield the use of the budget's two bounds: accelerators and cost per hour."""
    budget = service.spec.budget
    if budget is None:
        return
    devices, costs = {}, {}
    for role, pool in service.spec.pools.present.items():
        for variant in pool.variants:
            reference = variant.node_class_ref
            known = observed.node_classes.get(reference.name) if reference else None
            devices[role, variant.name] = float(
                variant.accelerators(known.accelerator if known else None)
            )
            costs[role, variant.name] = (known.cost_per_hour if known else None) or 0.0
    limit = budget.max_cost_per_hour
    for prices, bound in (
        (devices, budget.max_accelerators),
        (costs, None if limit is None else float(quantity.parse(limit))),
    ):
        each: dict[Role, float] = {}
        for (role, _), price in prices.items():
            each[role] = max(each.get(role, 0.0), price)
        steady = sum(prices.get(key, 0.0) * count for key, count in whole.items())
        yield BudgetUse(each, steady, bound)
